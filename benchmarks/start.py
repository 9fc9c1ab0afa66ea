"""How long a start takes: `headrace up` to the first tokens, and importing the driver (which must not bring torch).

python -m benchmarks.start [--quick] [--json FILE]
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.common import Aim, Stopwatch, arguments, median, read_json, report
from benchmarks.overlap import CONFIG, DATA

AS_UP_DOES = "from driver.cli import import_service; import_service(); import sys; sys.exit('torch' in sys.modules)"
PLAINLY = "import driver.up, sys; sys.exit('torch' in sys.modules)"


def first_token(directory: Path) -> float:
    """Seconds from starting the command to the first sampled tokens of a trajectory (seen by polling its progress)."""
    settings = [f"run_dir={directory}", "service.port=0", f"data={DATA}", f"store.directory=/dev/shm/headrace-bench-{time.time_ns():x}"]
    argv = [sys.executable, "-P", "-m", "driver.cli", "up", str(CONFIG), "--quiet"]
    watch = Stopwatch()
    process = subprocess.Popen([*argv, *(p for s in settings for p in ("--set", s))])
    try:
        facts = directory / "service.json"
        while not facts.exists():
            assert process.poll() is None and watch.seconds() < 120
            time.sleep(0.02)
        base = f"{read_json(facts)['url']}/v1/runs/sort-digits"
        with httpx.Client(trust_env=False) as http:
            while True:
                queues = http.get(f"{base}/queues").json()
                if queues["scoring"] or queues["ready"] or queues["consumed"]:
                    return watch.seconds()
                assert process.poll() is None and watch.seconds() < 120
                time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def importing(program: str) -> float:
    watch = Stopwatch()
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
    total = watch.seconds()
    watch = Stopwatch()
    subprocess.run([sys.executable, "-P", "-c", "pass"], check=True)
    return total - watch.seconds()


def main() -> int:
    options = arguments(__doc__)
    starts, imports = (1, 3) if options.quick else (5, 9)
    with tempfile.TemporaryDirectory() as directory:
        tokens = [first_token(Path(directory) / str(number)) for number in range(starts)]
    importing(PLAINLY)  # the first reads the files from disk
    figures = {
        "up_to_first_token_s": median(tokens),
        "import_driver_s": median([importing(AS_UP_DOES) for _ in range(imports)]),
        "import_driver_plainly_s": median([importing(PLAINLY) for _ in range(imports)]),
    }
    aims: dict[str, Aim] = {"up_to_first_token_s": ("<=", 20.0), "import_driver_s": ("<=", 1.0)}
    return report("start", figures, aims, options, ["torch", "megatron-core", "fastapi", "pyarrow"])


if __name__ == "__main__":
    sys.exit(main())
