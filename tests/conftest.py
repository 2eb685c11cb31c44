"""What must be so before any test is collected."""

import os

# Triton decides when it is first imported whether kernels are interpreted, and tests of other rooms
# import it with torch before those of the kernels are collected.
os.environ["TRITON_INTERPRET"] = "1"
