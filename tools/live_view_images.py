"""Makes docs/images/live-*.png from a real query: ``python tools/live_view_images.py``. Needs Chromium."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from rich.console import Console

from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.observe import draw
from kafka_eos_source.observe.draw import panel
from kafka_eos_source.observe.notebook import view_of
from kafka_eos_source.observe.view import QueryView, Status

IMAGES = Path(__file__).parents[1] / "docs" / "images"
RUN_SECONDS, WAIT_SECONDS = 80, 9
RECORDS_PER_SECOND = 4000
PAGE = '<!DOCTYPE html><html><head><meta charset="utf-8"></head><body style="margin:0">{}</body></html>'


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, EmbeddedKafka() as kafka:
        running, waiting = views(kafka, Path(folder))
        light = '<div style="background:#fff;color:#1a1a1a;padding:10px 18px">{}</div>'
        dark = '<div style="background:#14171c;color:#e4e4e4;padding:10px 18px">{}</div>'
        both = light.format(panel(running)) + dark.format(panel(waiting))
        picture(both, IMAGES / "live-panel.png", 824, 876, Path(folder))
        console = Console(record=True, width=100, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(draw.frame([running], 36))
        text = console.export_html(inline_styles=True, code_format="{code}")
        style = "margin:0;padding:14px 18px;background:#14171c;color:#e4e4e4;font:13px/1.35 monospace"
        picture(f'<pre style="{style}">{text}</pre>', IMAGES / "live-top.png", 824, 600, Path(folder))


def views(kafka: EmbeddedKafka, folder: Path) -> tuple[QueryView, QueryView]:
    """Returns the views of a query that runs, and of the same query after its broker was killed."""
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    for made in admin.create_topics([NewTopic("payments", 3), NewTopic("scores", 3)]).values():
        made.result(30)
    stop = threading.Event()
    threading.Thread(target=produce, args=(servers, stop), daemon=True).start()
    spark = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    read = {"kafka.bootstrap.servers": servers, "subscribe": "payments", "startingOffsets": "latest"}
    write = {
        "kafka.bootstrap.servers": servers,
        "topic": "scores",
        "application.id": "payment-scores",
        "checkpointLocation": str(folder / "checkpoint"),
        "sinks": "lake",
        "sink.lake.type": "filesystem",
        "sink.lake.path": str(folder / "lake"),
    }
    rows = spark.readStream.format("kafka-eos").options(**read).load().selectExpr("key", "value")
    query = rows.writeStream.format("kafka-eos").options(**write).start()
    time.sleep(RUN_SECONDS)
    running, _ = view_of(query)
    stop.set()
    query.processAllAvailable()
    kafka.kill_node(1)
    deadline = time.monotonic() + 60
    while True:
        waiting, _ = view_of(query)
        stands = waiting.status in (Status.WAITING, Status.RETRYING) and waiting.status_since is not None
        if (
            stands and waiting.at - (waiting.status_since or 0) > WAIT_SECONDS
        ) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    kafka.start_node(1)
    query.stop()
    spark.stop()
    return running, waiting


def produce(servers: str, stop: threading.Event) -> None:
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    number = 0
    while not stop.wait(0.05):
        for _ in range(RECORDS_PER_SECOND // 20):
            producer.produce("payments", f'{{"payment": {number}, "amount": 12.50}}', str(number % 997))
            number += 1
        producer.poll(0)


def picture(body: str, path: Path, width: int, height: int, folder: Path) -> None:
    page = folder / "page.html"
    page.write_text(PAGE.format(body))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "install Chromium"
    size = f"--window-size={width},{height}"
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-device-scale-factor=1.5",
    ]
    subprocess.run(
        [browser, *options, size, f"--screenshot={path}", page.as_uri()],
        check=True,
        stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
