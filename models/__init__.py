"""Llama-family models in Flax NNX, their weights, tokenizers and chat templates."""

from .chat import ChatTemplate as ChatTemplate
from .chat import ChatTemplateError as ChatTemplateError
from .config import LlamaConfig as LlamaConfig
from .config import RopeScaling as RopeScaling
from .llama import Llama as Llama
from .loading import LoadedModel as LoadedModel
from .loading import load_model as load_model
from .tokenizer import Tokenizer as Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "Llama",
    "LlamaConfig",
    "LoadedModel",
    "RopeScaling",
    "Tokenizer",
    "load_model",
]
