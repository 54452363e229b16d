"""What runs a planned call: groups of ranks, workspaces, the CPU and the CUDA backend."""
