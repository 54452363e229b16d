"""Front end of the benchmark harness, for torchrun and for a checkout: the same as `agmm bench`.

python benchmarks/bench.py
torchrun --nproc-per-node 4 benchmarks/bench.py --json new.json
"""

import typer

from agmm.cli.app import bench

if __name__ == "__main__":
    typer.run(bench)
