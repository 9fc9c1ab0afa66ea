"""The embedded engine: a small server for the CPU that speaks SGLang 0.5.23's HTTP API over a real model.

`python -P -m rollout.engine --model-path DIR --port PORT` serves a Qwen3, Qwen2 or Llama checkpoint: continuous batching over a KV
cache, log-probs, version spans, the three pause modes, memory release, weight updates from the store or from disk. What a client sees
is meant to be what SGLang shows; where the two differ by accident, this engine is wrong. It differs on purpose in these points:

- Calls that kill a real server (memory release while requests run, resume of what is not released, an id outside the vocabulary, a
  tensor of the wrong shape) are refused with a clear message, 500 or 400, logged loudly, and change nothing.
- No pickle is ever loaded: /update_weights_from_tensor takes load_format "headrace_store", references to objects in the store.
- There is no prefix cache across requests, so cached_tokens is 0 and nothing computed under old weights can be met under new ones.
- sampling_seed is always honoured. Prompt log-probs are of the temperature-scaled distribution, like those of the output.
- /health answers at once, as a server with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 does; /health_generate makes a token.
- /weights_checker reports sha256 of each weight under its Hugging Face name, so that a trainer can compute the same. Its action
  "headrace_store" names the weights that are equal to what lies in the store, `{"serialized_buckets": [base64(JSON of a Ref), ...]}`.
- Not here: n > 1, penalties, grammars, LoRA, distributed groups, the OpenAI routes. Asking for them is an error that says so.
"""
