"""`python -P -m tests.scripted up …`: the service with the benchmarks' scripted trainer, which takes no time; all else is the product's."""

import driver.processes
from benchmarks.bound_service import ScriptedSpecs
from driver import cli

if __name__ == "__main__":
    driver.processes.Specs = ScriptedSpecs  # type: ignore[misc]
    cli.main()
