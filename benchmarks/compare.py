"""Chairlift against other engines: the same work in the same run, interleaved A B A B, one at a time.

    python -m benchmarks compare --setup [--peers openvino,llamacpp,vllm,transformers] [--model smollm2]
    python -m benchmarks compare [--peers openvino,llamacpp,transformers] [--work w64,one_stream] [--rounds 3]
                                 [--json results.jsonl]

`--setup` makes an environment for every peer under `.peers` and brings the model into every peer's format, once. Each
contender is a process that loads once; while another measures it is stopped, so that it cannot take a core. bf16, two
threads, greedy, end of sequence ignored. Works:

    w64            64 prompts of 16 to 256 random tokens, 16 to 128 new tokens each: new tokens per second
    sampling       the same with temperature, top-k, top-p and penalties on every row: ours against ours, greedy
    one_stream     a prompt of 16 tokens: 128 more new tokens per second after the first
    prefill        a prompt of 1 024 tokens: prompt tokens per second until the first token
    shared_prefix  64 prompts of 1 016 tokens, 1 000 of them shared: seconds to all first tokens, also without sharing
    rows256        256 requests of 32 tokens, 64 new tokens each
    long_context   8 000 tokens in the cache, 64 more for 1 and for 8 rows; it takes minutes to fill, so only when named

What the machine could do is measured in our process, between our runs: the best bf16 matrix product and the best rate
of reading memory. `python -m benchmarks plot` draws what `--json` wrote.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.peers.setup import MODELS, PEERS, ROOT, is_ready, python, setup
from benchmarks.peers.works import WORKS, w64

OURS = "chairlift"
ALL_PEERS = ("openvino", "llamacpp", "vllm", "transformers")
WITH = {  # what a work is compared with, or consists of
    "shared_prefix": ("unshared_prefix", "shared_prefix"),
    "long_context": ("long_context", "long_context_8"),
}
DEFAULT_WORKS = "w64,sampling,one_stream,prefill,shared_prefix,rows256"
ONCE = {  # minutes each: one round has to do
    (OURS, "unshared_prefix"),
    ("transformers", "w64"),
    ("llamacpp", "rows256"),
    ("llamacpp", "long_context_8"),
}
LIMITED = ("w64", "one_stream")  # works that are also told as a share of what the machine could do
BESIDE = {"sampling": "w64"}  # and of what ours gives in another one, in turns


class Contender:
    """An engine in a process of its own; stopped, unless it measures."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self._log = PEERS / "logs" / f"{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [python(name), "-m", f"benchmarks.peers.{name}"]
        command += ["--model", str(PEERS / "models" / args.model), "--threads", str(args.threads)]
        # vLLM binds a thread to each core, and warns of what it would lose if it were told how many.
        environment = {} if name == "vllm" else {"OMP_NUM_THREADS": str(args.threads)}
        self._process = subprocess.Popen(
            [*command, *["--tiny"] * args.tiny],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            cwd=ROOT,
            env=os.environ | environment,
            start_new_session=True,
        )
        self.hello = self._answer()

    def can(self, work: str) -> bool:
        return work in self.hello["works"]

    def measure(self, work: str, number: int) -> dict[str, Any]:
        """Its answer for one round of a work. Raises RuntimeError, with the end of its log, when it has died."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{work} {number}\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has died:\n{self._log.read_text()[-2000:]}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


def chosen_works(names: str) -> list[str]:
    """The works that `names` stands for, in the order of `WORKS`."""
    wanted: set[str] = set()
    for name in names.split(","):
        if name not in WORKS:
            sys.exit(f"there is no work {name!r}; there are {', '.join(WORKS)}")
        wanted.update(WITH.get(name, (name,)))
    return [name for name in WORKS if name in wanted]


def start(names: Sequence[str], args: argparse.Namespace) -> list[Contender]:
    contenders = []
    for name in names:
        if not is_ready(name, args.model):
            print(f"{name} is not set up for {args.model}: python -m benchmarks compare --setup --peers {name}")
            continue
        try:
            contenders.append(Contender(name, args))
            print(f"{name}: {contenders[-1].hello['versions']}", flush=True)
        except RuntimeError as error:
            print(error)
    return contenders


def measure(work: str, contenders: list[Contender], args: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one work: what each contender gave, and next to ours the limits of the machine, or another work."""
    able = [contender for contender in contenders if contender.can(work)]
    results: dict[str, list[float]] = {contender.name: [] for contender in able}
    limits: dict[str, list[float]] = {"matmul": [], "read": []}
    beside: list[float] = []
    for number in range(args.rounds):
        for contender in able:
            if number and (contender.name, work) in ONCE:
                continue
            try:
                results[contender.name].append(contender.measure(work, number)["value"])
                if contender.name == OURS and work in LIMITED:
                    for name, rate in contender.measure("limits", number).items():
                        limits[name].append(rate)
                if contender.name == OURS and work in BESIDE:
                    beside.append(contender.measure(BESIDE[work], number)["value"])
            except RuntimeError as error:
                print(error)
                contender.hello["works"] = []
                able = [other for other in able if other is not contender]
                break
            print(f"{work}, round {number + 1}: {contender.name}: {results[contender.name][-1]:.2f}", flush=True)
    return {
        "results": {name: values for name, values in results.items() if values},
        "limits": limits,
        "beside": beside,
    }


def share(work: str, ours: list[float], limits: dict[str, list[float]], sizes: dict[str, int], args: Any) -> str:
    """How much of what the machine could do in the same seconds that was: the median of the rounds, and of the best of
    all rounds. Attention is not counted: weights and their products."""
    if work == "w64":
        prompts, counts = w64(count=4 if args.tiny else 64)
        passes = sum(map(len, prompts)) + sum(counts) - len(counts)  # a request's last token is not read again
        work_per_token = 2 * (passes * sizes["layers"] + sum(counts) * sizes["head"]) / sum(counts)
        best, unit = limits["matmul"], "GFLOP/s of the best product"
    else:
        work_per_token = (sizes["layers"] + sizes["head"]) * sizes["itemsize"]
        best, unit = limits["read"], "GB/s of the best read"
    rates = [rate * work_per_token / 1e9 for rate in ours]
    shares = [rate / limit for rate, limit in zip(rates, best, strict=False)]  # a round may have failed between them
    rate, most = statistics.median(rates), max(best)
    return f"{statistics.median(shares):.3f}; of all rounds' {rate / most:.3f}: {rate:.1f} of {most:.1f} {unit}"


def show(work: str, record: dict[str, Any], sizes: dict[str, int], args: argparse.Namespace) -> None:
    """Medians, and how much better ours is."""
    about, results = WORKS[work], record["results"]
    print(f"\n{about.title}, {about.unit}: median of the rounds, and how many times as good ours is")
    ours = statistics.median(results[OURS]) if OURS in results else None
    for name, values in results.items():
        median = statistics.median(values)
        ratio = "" if ours is None else f"x {median / ours if about.less_is_better else ours / median:.2f}"
        print(f"  {name:14} {median:10.2f}   {ratio:8}   ({' '.join(f'{value:.2f}' for value in values)})")
    if ours is not None and record["limits"]["matmul"]:
        print(f"  {share(work, results[OURS], record['limits'], sizes, args)}")
    if record["beside"]:
        ratio = statistics.median(a / b for a, b in zip(results[OURS], record["beside"], strict=False))
        print(f"  {ratio:.3f} of {WORKS[BESIDE[work]].title} in the same rounds")


def show_pair(text: str, first: str, second: str, records: dict[str, dict[str, Any]]) -> None:
    """Ours in one work divided by ours in another."""
    values = [records.get(work, {}).get("results", {}).get(OURS) for work in (first, second)]
    if all(values):
        print(f"{text}: {statistics.median(values[0]) / statistics.median(values[1]):.3f}")


def run(args: argparse.Namespace) -> None:
    works = chosen_works(args.work)
    contenders = start([OURS, *args.peers], args)
    try:
        facts = {
            "model": args.model,
            "tiny": args.tiny,
            "versions": {contender.name: contender.hello["versions"] for contender in contenders},
            "startup": next((each.hello["startup"] for each in contenders if each.name == OURS), None),
        }
        sizes = next((contender.hello["sizes"] for contender in contenders if contender.name == OURS), {})
        records = {}
        for work in works:
            records[work] = record = measure(work, contenders, args)
            if args.json:
                about = {"benchmark": "compare", "work": work, "title": WORKS[work].title, "unit": WORKS[work].unit}
                line = about | facts | record | {"less_is_better": WORKS[work].less_is_better} | machine()
                with open(args.json, "a") as file:
                    file.write(json.dumps(line | {"threads": args.threads}) + "\n")
    finally:
        for contender in contenders:
            contender.end()
    for work, record in records.items():
        show(work, record, sizes, args)
    print()
    show_pair("prefill with a shared prefix against without", "shared_prefix", "unshared_prefix", records)
    if facts["startup"] is not None:
        print(f"from the loaded model to its first token: {facts['startup']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="set the peers up, and measure nothing")
    parser.add_argument("--peers", default="openvino,llamacpp,transformers", help=f"of {', '.join(ALL_PEERS)}")
    parser.add_argument("--work", default=DEFAULT_WORKS)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="append the results to this file")
    parser.add_argument("--tiny", action="store_true", help="a sixteenth of each work, to see that everything runs")
    args = parser.parse_args()
    args.peers = [name for name in args.peers.split(",") if name]
    if unknown := sorted(set(args.peers) - set(ALL_PEERS)):
        parser.error(f"there are no peers {', '.join(unknown)}; there are {', '.join(ALL_PEERS)}")
    if not args.setup:
        run(args)
    elif failed := setup(args.peers, args.model):
        sys.exit("\n".join(f"{peer} could not be set up: {why}" for peer, why in failed.items()))


if __name__ == "__main__":
    main()
