"""One Llama-shaped transformer block, end to end: agmm's layers beside NCCL and torch's async TP.

RMSNorm, attention with grouped heads and rotary positions, SwiGLU; tensor parallel over all ranks,
activations [tokens / ranks, 1, hidden] sharded along the sequence, one causal sequence. All ways
have the same weights and input. Each is checked against a whole block in float32 before it is
timed; a way that fails stays in the table with its reason.

    python -m benchmarks.block
    python -m benchmarks.block --quick --tokens 4096 --json block.json
    python -m benchmarks.block --fp8 rowwise
    torchrun --nproc-per-node 4 -m benchmarks.block
    python -m benchmarks.block --device cpu --world-size 2
"""
