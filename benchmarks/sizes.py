"""What every benchmark measures at: token counts of decode, the io dtype, calls of each case."""

TOKENS = (1, 4, 16, 64)
ROUNDS = 15
DTYPE = "bfloat16"
