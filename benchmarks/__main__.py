"""Run a benchmark by name: `python -m benchmarks NAME [options]`; without a name, list them."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    folder = Path(__file__).parent
    names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_") and path.stem != "common")
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print("usage: python -m benchmarks NAME [options]\n")
        for name in names:
            first = (folder / f"{name}.py").read_text().splitlines()[0].strip('"')
            print(f"  {name:15} {first}")
        sys.exit(len(sys.argv) > 1)
    del sys.argv[0]
    runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
