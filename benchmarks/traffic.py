"""The bytes of a round by number of institutions: Kalra et al.'s Fig. 4 in bytes, as a table and a picture.

    python benchmarks/traffic.py --data ../shared/data/mnist --picture docs/img/proxyfl-traffic.png

Bytes between the server and the institutions are those of the forecast, which equals a run's ledger (the contract tests
compare them): a round of MLPs (proxies, and FedAvg's model), without evaluation or Flower's envelopes. The bytes of a
true peer-to-peer network are computed, not measured: one released model over a link; from a sender, one for each of its
receivers in the round's graph. The paper shows seconds on its network, where a server is the bottleneck. This package
sends everything through a server, so it can compare bytes only.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation
from flwr_replay.forecast.forecast import forecast
from flwr_replay.movements.topology import mixing_matrix, receivers

INSTITUTIONS = (4, 8, 16, 32)
METHODS = {  # options, and the graph of the models' recipients
    "ProxyFL, exponential graph": (["strategy=proxyfl"], "exponential"),
    "ProxyFL, complete graph": (["strategy=proxyfl", "topology=complete"], "complete"),
    "FML": (["strategy=fml"], ""),
    "AvgPush": (["strategy=avgpush", "dp=classifier"], "exponential"),
    "FedAvg": (["strategy=fedavg", "dp=classifier"], ""),
}


def one_round(options: list[str], nodes: int, data: str) -> tuple[float, float]:
    """Return the bytes of a round between the server and one institution, and the bytes of one released model."""
    sizes = []
    for rounds in (1, 2):
        shared = ["task=mnist", f"task.data-dir={data}", "preset=paper", "partition.size=50", "batch_size=25"]
        config = compose([*options, *shared, f"nodes={nodes}", f"rounds={rounds}", "evaluate_every=9"])
        sizes.append(
            {
                (line.institution, line.direction, line.stage, line.field): line.bytes
                for line in forecast(Simulation.of(config))
            }
        )
    first, both = sizes
    grown = {key: both[key] - first.get(key, 0) for key in both}
    released = max(size for (_, direction, _, _), size in grown.items() if direction == "up")
    return sum(grown.values()) / nodes, released


def main() -> None:
    """Print a row for every method and number of institutions; draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with MNIST's idx files")
    parser.add_argument("--picture", default="", help="a PNG file to write")
    asked = parser.parse_args()
    print("| method | institutions | MB of an institution | of the server | over a link, from a sender (computed) |")
    print("|---|---|---|---|---|")
    rows: dict[str, list[tuple[float, float, float | None]]] = {}
    for method, (options, graph) in METHODS.items():
        for nodes in INSTITUTIONS:
            own, released = one_round(options, nodes, str(Path(asked.data).absolute()))
            sent, shown = None, "–"
            if graph:
                p = mixing_matrix(graph, nodes, 0)
                sent = released / 1e6 * max(len(receivers(p, k)[0]) for k in range(nodes))
                shown = f"{released / 1e6:.2f}, {sent:.2f}"
            rows.setdefault(method, []).append((own / 1e6, own * nodes / 1e6, sent))
            print(f"| {method} | {nodes} | {own / 1e6:.2f} | {own * nodes / 1e6:.1f} | {shown} |")
    if asked.picture:
        draw(rows).savefig(asked.picture, dpi=110)


def draw(rows: dict[str, list[tuple[float, float, float | None]]]) -> Figure:
    """Draw the bytes of an institution, of the server, and of a sender in a peer-to-peer network."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    titles = "an institution (forecast)", "the server (forecast)", "a sender, peer to peer (computed)"
    for place, (axes, title) in enumerate(zip(figure.subplots(1, 3, sharey=True), titles, strict=True)):
        for number, (method, bars) in enumerate(rows.items()):
            ys, size = (
                [row[place] for row in bars],
                12 - 2 * number,
            )  # markers of different sizes, so that equal points are visible
            if None not in ys:
                axes.plot(INSTITUTIONS, ys, marker="os^Dv"[number], ms=size, label=method, color=f"C{number}")
        axes.set(xscale="log", yscale="log", xlabel="institutions", title=title)
        axes.set_xticks(INSTITUTIONS, [str(nodes) for nodes in INSTITUTIONS])
        axes.minorticks_off()
    figure.axes[0].set_ylabel("MB a round")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


if __name__ == "__main__":
    main()
