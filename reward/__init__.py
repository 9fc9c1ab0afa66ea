"""Scores leaves: rules and the user's functions, in processes that can be killed, over one small HTTP service.

A score that could not be made is a failure with its reason, never a number. `reward.client` and `reward.wire` are what the driver imports.
"""
