"""The bundled model: a few million parameters trained on the standard library, so that a fresh install says something.

Only data, made by `scripts/train_bundled.py`: `checkpoint/` is an Orbax checkpoint with its tokenizer, `TRAINING.json`
records how it was trained and what it is worth. It completes Python; it knows nothing else.
"""

from pathlib import Path

BUNDLED = Path(__file__).with_name("checkpoint")  # for `load_model` and `load_text`
