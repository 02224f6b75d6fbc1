"""A plot, and a table in Markdown, of what `compare --json` has written.

    python -m benchmarks plot results.jsonl [--model smollm2] [--out compare.svg]

Of each work the newest line counts. Needs matplotlib: pip install 'chairlift[bench]'. The table is printed without it.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

NAMES = {
    "chairlift": "Chairlift",
    "openvino": "OpenVINO GenAI",
    "llamacpp": "llama.cpp",
    "vllm": "vLLM-CPU",
    "transformers": "transformers",
}
COLOURS = {
    "chairlift": "#c0392b",
    "openvino": "#7f8c8d",
    "llamacpp": "#95a5a6",
    "vllm": "#b2bec3",
    "transformers": "#d5dbdb",
}


def newest(path: Path, model: str) -> dict[str, dict[str, Any]]:
    """The last record of each work on a model. Raises SystemExit when there is none."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    records = {
        line["work"]: line
        for line in lines
        if line["benchmark"] == "compare" and line["model"] == model and not line["tiny"]
    }
    if not records:
        raise SystemExit(f"{path} has no results of {model}; run: python -m benchmarks compare --json {path}")
    return records


def medians(record: dict[str, Any]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in record["results"].items()}


def table(records: dict[str, dict[str, Any]]) -> str:
    """One row for each work: medians, and in brackets how many times as good ours is."""
    names = [name for name in NAMES if any(name in record["results"] for record in records.values())]
    lines = ["| | " + " | ".join(NAMES[name] for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for record in records.values():
        values, cells = medians(record), []
        for name in names:
            if name not in values:
                cells.append("–")
                continue
            number = f"{values[name]:.3g}" if values[name] < 100 else f"{values[name]:.0f}"
            ours = values.get("chairlift")
            if name == "chairlift" or ours is None:
                cells.append(number)
            else:
                ratio = values[name] / ours if record["less_is_better"] else ours / values[name]
                cells.append(f"{number} (× {ratio:.2f})")
        lines.append(f"| {record['title']}, {record['unit']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(records: dict[str, dict[str, Any]], out: Path) -> None:
    """A panel for each work that has a peer; the bars are medians, the dots are rounds."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "chairlift", "font.size": 9}
    from matplotlib import pyplot

    shown = [record for record in records.values() if len(record["results"]) > 1]
    if not shown:
        raise SystemExit("no work has a peer to be drawn beside")
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.4 * columns, 1.9 * rows), squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, record in zip(axes.flat, shown, strict=False):
        names = [name for name in reversed(NAMES) if name in record["results"]]
        values = medians(record)
        bars = axis.barh([NAMES[n] for n in names], [values[n] for n in names], color=[COLOURS[n] for n in names])
        axis.bar_label(bars, fmt="{:,.3g}" if max(values.values()) < 100 else "{:,.0f}", padding=3)
        for place, name in enumerate(names):
            axis.plot(record["results"][name], [place] * len(record["results"][name]), "k.", markersize=2)
        less = ", less is better" if record["less_is_better"] else ""
        axis.set_title(f"{record['title']}, {record['unit']}{less}", fontsize=9, loc="left")
        axis.set_xlim(0, max(values.values()) * 1.2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    print(f"\n{out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, help="an SVG or PNG file")
    args = parser.parse_args()
    records = newest(args.results, args.model)
    print(table(records))
    if args.out:
        draw(records, args.out)


if __name__ == "__main__":
    main()
