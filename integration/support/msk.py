"""Makes a broker check tokens as Amazon MSK does: compiles `MskValidator` into a jar for the broker's JVM."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

from kafka_eos_source.embedded import java

_SOURCE = Path(__file__).parent / "java" / "MskValidator.java"
CLASS = "test.MskValidator"


def compiler() -> str | None:
    """Returns the Java compiler beside the Java that brokers use, or on the path; None = there is none."""
    beside = os.path.join(os.path.dirname(java.find()), "javac")
    return beside if os.path.exists(beside) else shutil.which("javac")


def validator_jar(folder: Path) -> Path:
    """Compiles the validator. A JVM with ``-javaagent`` and this jar finds the class."""
    program = compiler()
    assert program is not None
    subprocess.run(
        [program, "-J-XX:TieredStopAtLevel=1", "-cp", f"{java.jars()}/*", "-d", str(folder), str(_SOURCE)],
        check=True,
        capture_output=True,
    )
    path = folder / "validator.jar"
    with zipfile.ZipFile(path, "w") as jar:
        jar.writestr("META-INF/MANIFEST.MF", f"Manifest-Version: 1.0\nPremain-Class: {CLASS}\n")
        for each in (folder / "test").iterdir():
            jar.write(each, f"test/{each.name}")
    return path
