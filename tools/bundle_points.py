"""Write the measured points that ship with the package: python tools/bundle_points.py FOLDER

FOLDER holds measured_serving_points.csv, measured_latency_points.csv and peer_predictions.csv. They are stored whole,
compressed, byte for byte the same on every run; columns that hold nothing but prose stay, as rows are judged by them.
"""

from __future__ import annotations

import argparse
import gzip
import io
from pathlib import Path

TARGET = Path(__file__).parents[1] / "src" / "bstar" / "calibration" / "data"
NAMES = ("measured_serving_points", "measured_latency_points", "peer_predictions")


def compressed(data: bytes) -> bytes:
    """gzip without a time or a name in it."""
    out = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(data)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    TARGET.mkdir(exist_ok=True)
    for name in NAMES:
        data = (folder / f"{name}.csv").read_bytes().replace(b"\r\n", b"\n")
        (TARGET / f"{name}.csv.gz").write_bytes(compressed(data))
        print(f"{name}: {len(data):,} bytes")


if __name__ == "__main__":
    main()
