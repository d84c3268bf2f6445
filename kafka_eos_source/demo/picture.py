"""Draws a picture of the run: what was committed over time, and when the driver was killed."""

from __future__ import annotations

from pathlib import Path

from kafka_eos_source.demo.run import History


def draw(history: History, total: int, path: Path) -> None:
    """Writes a PNG with committed input offsets, records of the at-least-once output, and kills."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5), dpi=120)
    axes.axhline(total, color="0.6", linewidth=1)
    axes.annotate(f"{total:,} events", (0, total), xytext=(4, 4), textcoords="offset points", color="0.4")
    axes.step(
        history.seconds,
        history.committed,
        where="post",
        color="#0b6e4f",
        linewidth=2,
        label="exactly once: input offsets committed",
    )
    if any(history.written):
        axes.step(
            history.seconds,
            history.written,
            where="post",
            color="#c8553d",
            linewidth=1.5,
            linestyle="--",
            label="at least once: records written",
        )
        if history.written[-1] > total:
            axes.annotate(
                f"{history.written[-1] - total:,} too many",
                (history.seconds[-1], history.written[-1]),
                xytext=(0, 4),
                textcoords="offset points",
                ha="right",
                color="#c8553d",
            )
    for number, (at, what) in enumerate(history.kills):
        axes.axvline(
            at, color="#222222", linewidth=1, linestyle=":", label=None if number else "driver killed"
        )
        axes.annotate(
            "SIGKILL" if what == "random" else f"SIGKILL at {what}",
            (at, 0.02),
            xycoords=axes.get_xaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            fontsize=8,
            color="#222222",
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("events")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9))
    axes.set_title(f"Driver killed {len(history.kills)} times: what was committed, over time")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
