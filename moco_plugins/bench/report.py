"""stub"""
from pathlib import Path
def write_report(folders, out, metric): return Path(out)
