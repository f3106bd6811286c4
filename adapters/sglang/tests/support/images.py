"""A tiny model that sees images, Qwen2.5-VL with random weights, and what transformers generates with it."""

from __future__ import annotations

import base64
import functools
import io
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from .models import VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FIRST_WORD", "Seen", "describe", "draw_image", "make_seeing"]

PATCH, MERGED = 14, 2
START, END, IMAGE, VIDEO = range(4, 8)
SPECIAL = {"<|vision_start|>": START, "<|vision_end|>": END, "<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO}
FIRST_WORD = 8
"""Token ids from here on are words of a text."""
WIDTH, HEIGHT = 112, 84
"""Of the images, in pixels: 12 tokens."""
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 224 * 224


class Seen(NamedTuple):
    """A text with an image in it.

    Attributes:
        before: Token ids of the words before the image.
        image: A PNG.
        after: Token ids of the words after it.
    """

    before: list[int]
    image: bytes
    after: list[int]

    @property
    def fields(self) -> dict[str, Any]:
        """What a request to SGLang has of it."""
        place = "<|vision_start|><|image_pad|><|vision_end|>"
        text = " ".join([*(f"t{n}" for n in self.before), place, *(f"t{n}" for n in self.after)])
        image = f"data:image/png;base64,{base64.b64encode(self.image).decode()}"
        return {"input_ids": None, "text": text, "image_data": [image]}


def draw_image(seed: int) -> bytes:
    """An image of random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    made = io.BytesIO()
    Image.fromarray(pixels).save(made, "PNG")
    return made.getvalue()


def make_seeing(folder: Path) -> Path:
    """Qwen2.5-VL: two layers that see, one of them in windows, and two layers of full attention."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder.mkdir(parents=True)
    positions = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}
    config = {
        **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "dtype": "float32"},
        **{"vision_start_token_id": START, "vision_end_token_id": END},
        **{"image_token_id": IMAGE, "video_token_id": VIDEO},
        "vision_config": {
            **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64},
            **{"patch_size": PATCH, "spatial_merge_size": MERGED, "temporal_patch_size": 2, "in_channels": 3},
            **{"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2, "hidden_act": "silu"},
        },
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCABULARY},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
        **{"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        # SGLang reads the second, and transformers the first.
        **{"rope_theta": 10000.0, "rope_parameters": {**positions, "rope_theta": 10000.0}, "rope_scaling": positions},
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(20)
    maker: Any = AutoModelForImageTextToText
    model = maker.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.normal_(1.0, 0.1)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # as SGLang reads it
    _write_processor(folder)
    return folder


def _write_processor(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **SPECIAL}
    words |= {f"t{n}": n for n in range(FIRST_WORD, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **named}))
    named = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    patches = {"patch_size": PATCH, "merge_size": MERGED, "temporal_patch_size": 2}
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    size = {"size": {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**named, **patches, **colours, **size}))


def describe(folder: Path, seen: Seen, count: int) -> list[int]:
    """The tokens that transformers generates after a text with an image, each the most likely one."""
    import torch
    from PIL import Image

    model, processor = _loaded(folder)
    made = processor(images=[Image.open(io.BytesIO(seen.image))], return_tensors="pt")
    places = int(made["image_grid_thw"].prod()) // MERGED**2
    prompt = torch.tensor([[*seen.before, START, *[IMAGE] * places, END, *seen.after]])
    given = {**made, "mm_token_type_ids": (prompt == IMAGE).int()}
    found = model.generate(prompt, **given, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
    tokens: list[int] = found[0, prompt.shape[1] :].tolist()
    return tokens


@functools.cache
def _loaded(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.set_num_threads(1)
    loader: Any = AutoModelForImageTextToText
    processor: Any = Qwen2VLImageProcessorPil
    return loader.from_pretrained(folder).float().eval(), processor.from_pretrained(folder)
