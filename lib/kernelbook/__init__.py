"""Claims about quantized LLM inference on GPUs, put to the test on the machine at hand."""

from pathlib import Path

__version__ = "0.1.0"

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: notebooks/, kernels/, results/ and runs/ lie below it."""
