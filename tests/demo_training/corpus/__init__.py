"""The generated corpus: skills that write exchanges, and the mixture that turns them into documents.

Every text here is made by these modules from their own tables; nothing is read from elsewhere.
"""

from demo_training.corpus.mixture import WEIGHTS, documents, draw, held_out_samples, samples
from demo_training.corpus.render import Document, answer_message, prompt_messages, render
from demo_training.corpus.sample import Sample, is_held_out

__all__ = [
    "WEIGHTS",
    "Document",
    "Sample",
    "answer_message",
    "documents",
    "draw",
    "held_out_samples",
    "is_held_out",
    "prompt_messages",
    "render",
    "samples",
]
