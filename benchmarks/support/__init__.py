"""What the benchmark scripts share.  The scripts lie beside this folder and run as ``python benchmarks/NAME.py``."""
