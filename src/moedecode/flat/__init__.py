"""What the flat functions need to turn plain arguments into specs, weights and checked arrays.

Owns the reading of enums, dtypes, ranks, expert ids and packed layouts. Knows no backend's inside.
"""
