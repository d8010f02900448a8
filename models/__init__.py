"""Llama-family models in Flax NNX, their weights, tokenizers and chat templates."""

from .chat import ChatTemplate as ChatTemplate
from .chat import ChatTemplateError as ChatTemplateError
from .config import LlamaConfig as LlamaConfig
from .config import RopeScaling as RopeScaling
from .llama import HiddenStates as HiddenStates
from .llama import Llama as Llama
from .loading import LoadedModel as LoadedModel
from .loading import load_model as load_model
from .lora_adapter import LoraAdapter as LoraAdapter
from .peft import load_adapter as load_adapter
from .peft import save_adapter as save_adapter
from .tokenizer import Tokenizer as Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "HiddenStates",
    "Llama",
    "LlamaConfig",
    "LoadedModel",
    "LoraAdapter",
    "RopeScaling",
    "Tokenizer",
    "load_adapter",
    "load_model",
    "save_adapter",
]
