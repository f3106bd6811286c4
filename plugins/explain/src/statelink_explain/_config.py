"""Reads what a model keeps for a request from its ``config.json``, as published on Hugging Face.

A file is read by its fields. Each field that says something about state is understood, or the file is refused with its
name. For the model types in ``families.toml``, a field that is absent has the default of that type; for other types, it
has none. The table follows the configuration classes of transformers 5.23.
"""

from __future__ import annotations

import importlib.resources
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from statelink.errors import ConfigError

from ._fields import COMPRESSED, DTYPES, HARMLESS, KINDS, LETTERS, MEANING, NESTED, STATE, Kinds
from ._model import Attention, Chunk, Compressed, Dtype, Index, Kind, Latent, Mamba, Model, Window, parse_toml

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_config"]


def read_config(path: Path) -> Model:
    """Read a model from its ``config.json``, or from a folder that has one.

    The model's name is its type, so two copies of one file describe the same model. Its source lists the fields that
    were read.

    Raises:
        ConfigError: The file cannot be read, lacks a field, has fields about state that are not understood, or has two
            fields that contradict each other. The error names the fields.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file.name} cannot be read", cause=str(error)) from error
    if not isinstance(given, dict):
        raise ConfigError(f"{file.name} is no model's configuration", cause="it holds no JSON object")
    try:
        return _Reader(given).model()
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A field of another shape than any published file has.
        cause = f"a field has an unexpected value: {type(error).__name__}: {error}"
        raise ConfigError("a model's configuration cannot be read", cause=cause) from error


class _Reader:
    """One configuration, and what was read of it."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        nested = [name for name in NESTED if isinstance(whole.get(name), dict)]
        if len(nested) > 1:
            raise ConfigError("a configuration holds one language model", cause=f"it has {' and '.join(nested)}")
        self.whole = whole
        self.given: Mapping[str, Any] = whole[nested[0]] if nested else whole
        self.type = str(self.given.get("model_type") or whole.get("model_type") or "")
        if not self.type:
            raise ConfigError("a model's configuration has no 'model_type'", hint="is it the model's config.json?")
        families = parse_toml(importlib.resources.files(__package__).joinpath("families.toml").read_text("utf-8"))
        self.known = self.type in families
        self.defaults: Mapping[str, Any] = families.get(self.type, {})
        for name in self.defaults.get("told", ()):
            if name not in self.given:
                raise self.missing(name)
        self.read: dict[str, Any] = {}
        self.by_default: set[str] = set()
        self.without_meaning: set[str] = set()
        self.notes: list[str] = []

    def model(self) -> Model:
        """The model that the configuration describes."""
        if self.get("is_encoder_decoder") or self.whole.get("is_encoder_decoder"):
            raise self.refusal("is_encoder_decoder", "what an encoder leaves for its decoder is not described")
        layers = self.layers()
        latent = self.latent()
        layers = self.indexed(layers, latent is not None)
        used = {kind for kinds in layers for kind in kinds}
        sections: dict[str, Any] = {
            "latent": latent if "full" in used else None,
            "attention": self.attention(layers) if "full" in used and latent is None else None,
            "window": self.window(layers) if "window" in used else None,
            "chunk": self.chunk(layers) if "chunk" in used else None,
            "index": self.index(latent is not None) if "index" in used else None,
            "mamba": self.mamba() if "mamba" in used else None,
            "compressed": self.compressed(len(layers)) if "compressed" in used else None,
        }
        self.without_meaning |= {
            name
            for name in self.given
            if any(pattern.fullmatch(name) for kinds, pattern in MEANING if used.isdisjoint(kinds))
        }
        dtypes = self.dtypes()
        self.refuse_the_rest()
        if not self.known:
            self.notes.append(f"model_type {self.type!r} is not known: only its fields were read.")
        if self.given.get("num_nextn_predict_layers"):
            self.notes.append("Draft (MTP) layers are not described.")
        described = {
            "name": self.type,
            "layers": len(layers),
            "pattern": _shortest(layers),
            "page": 256 if "compressed" in used else 64,
            "source": f"config.json of type {self.type}: {', '.join(self.shown())}",
            "note": " ".join(self.notes),
            **dtypes,
            **{name: section for name, section in sections.items() if section is not None},
        }
        return Model.read(msgspec.to_builtins(described), "model of a config.json")

    def shown(self) -> Iterator[str]:
        """What was read, in words."""
        for name, value in self.read.items():
            yield f"{name} {_short(value)}{' (by default)' * (name in self.by_default)}"

    # Fields

    def get(self, *names: str) -> Any:
        """A field by its names, the first of which that is there counts. ``None`` if it is absent or null."""
        for name in names:
            if name in self.given:
                return self.took(name, self.given[name])
        for name in names:
            if name in self.defaults:
                self.by_default.add(name)
                return self.took(name, self.defaults[name])
        return None

    def took(self, name: str, value: Any) -> Any:
        if value is not None:
            self.read[name] = value
        return value

    def count(self, *names: str) -> int:
        """A field that is a whole number above 0."""
        value = self.get(*names)
        if value is None:
            raise self.missing(names[0])
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(names[0], f"a whole number above 0 is expected, got {value!r:.40}")
        return value

    def optional(self, *names: str) -> int | None:
        """The same, or ``None`` if it is absent, null or 0."""
        return self.count(*names) if self.get(*names) else None

    def missing(self, name: str) -> ConfigError:
        said = (
            "its type has no default for it"
            if self.known
            else f"the type {self.type!r} is not known, so it has no default"
        )
        return ConfigError(
            f"a model's configuration has no {name!r}",
            cause=said,
            hint=f"add {name!r} to a copy of the file, or describe the model in a section [model]",
        )

    def refusal(self, name: str, cause: str) -> ConfigError:
        return ConfigError(
            f"{name!r} in a model's configuration of type {self.type!r} is not understood",
            cause=cause,
            hint="describe the model in a section [model]",
        )

    def refuse_the_rest(self) -> None:
        """Refuse fields that may describe state and that nothing has read."""
        rest = [
            name
            for name, value in self.given.items()
            if value
            and name not in (self.read.keys() | self.without_meaning)
            and STATE.search(name)
            and not HARMLESS.fullmatch(name)
        ]
        if rest:
            raise self.refusal(", ".join(sorted(rest)), "such fields may describe state, and nothing here reads them")

    # Layers

    def layers(self) -> list[Kinds]:
        """What each layer keeps."""
        found = dict(self.said(self.given, None))
        lengths = {len(words) for words in found.values()}
        count = self.optional("num_hidden_layers") or (max(lengths) if lengths else self.count("num_hidden_layers"))
        found = {name: self.fitted(name, words, count) for name, words in self.said(self.given, count)}
        if not found:
            found = {name: self.fitted(name, words, count) for name, words in self.said(self.defaults, count)}
        if not found:
            found = {"": ["full_attention"] * count}
            self.check_plain()
        first, words = next(iter(found.items()))
        kinds = [self.kinds(first, word) for word in words]
        for other, others in found.items():
            if [self.kinds(other, word) for word in others] != kinds:
                raise self.refusal(f"{first}, {other}", "the two say different things about the layers")
        if shared := self.optional("num_kv_shared_layers"):
            if shared >= count:
                raise self.refusal("num_kv_shared_layers", f"it is {shared} of {count} layers")
            kinds[count - shared :] = [()] * shared
        return kinds

    def said(self, given: Mapping[str, Any], count: int | None) -> Iterator[tuple[str, Sequence[str]]]:
        """Each field of ``given`` that says what the layers are, and a word for each layer.

        Fields that need the number of layers are left out if ``count`` is ``None``.
        """

        def has(name: str) -> Any:
            value = given.get(name)
            return self.took(name, value) if value is not None else None

        for name in ("layer_types", "layers_block_type"):
            if words := has(name):
                yield name, words
        if letters := has("hybrid_override_pattern"):
            yield "hybrid_override_pattern", [LETTERS.get(letter, letter) for letter in letters]
        if flags := has("attn_type_list"):
            yield "attn_type_list", ["full_attention" if flag else "linear_attention" for flag in flags]
        if flags := has("hybrid_layer_pattern"):
            yield "hybrid_layer_pattern", ["sliding_attention" if flag else "full_attention" for flag in flags]
        if "sparse_attention_freq" in (sparse := given.get("sparse_attention_config") or {}):
            self.took("sparse_attention_config", sparse)
            flags = sparse["sparse_attention_freq"]
            yield "sparse_attention_config", ["indexed_attention" if flag else "full_attention" for flag in flags]
        if (ratios := has("compress_ratios")) is not None:
            yield "compress_ratios", ["compressed_attention"] * len(ratios)
        if count is None:
            return
        numbers = range(count)
        if "full_attn_layers" in (linear := given.get("linear_attn_config") or {}):
            self.took("linear_attn_config", linear)
            words = dict.fromkeys(linear["full_attn_layers"], "full_attention")  # layers are counted from 1
            words.update(dict.fromkeys(linear["kda_layers"], "linear_attention"))
            yield "linear_attn_config", [words.get(n + 1, "neither full nor KDA") for n in numbers]
        if indices := has("attn_layer_indices"):
            yield "attn_layer_indices", [_either(n in indices, "attention", "mamba") for n in numbers]
        if indices := has("full_attn_idxs"):
            yield "full_attn_idxs", [_either(n in indices, "attention", "conv") for n in numbers]
        if period := has("attn_layer_period"):
            offset = self.get("attn_layer_offset") or 0
            yield "attn_layer_period", [_either(n % period == offset, "attention", "mamba") for n in numbers]
        if interval := has("full_attention_interval"):
            words = [_either((n + 1) % interval == 0, "full_attention", "linear_attention") for n in numbers]
            yield "full_attention_interval", words
        for name in ("sliding_window_pattern", "_sliding_window_pattern"):
            if isinstance(pattern := has(name), int):
                yield name, [_either((n + 1) % pattern == 0, "full_attention", "sliding_attention") for n in numbers]
            elif isinstance(pattern, str):
                full_at = [pattern[n % len(pattern)] == "G" for n in numbers]
                yield name, [_either(full, "full_attention", "sliding_attention") for full in full_at]
        if self.get("attention_chunk_size"):
            rotated = has("no_rope_layers") or None
            if rotated is None and (interval := has("no_rope_layer_interval")):
                rotated = [(n + 1) % interval for n in numbers]
            if rotated is not None:
                yield "no_rope_layers", [_either(bool(n), "chunked_attention", "full_attention") for n in rotated]
        if given.get("use_sliding_window") and self.get("sliding_window"):
            first = self.get("max_window_layers") or 0
            self.took("use_sliding_window", True)
            yield "max_window_layers", [_either(n < first, "full_attention", "sliding_attention") for n in numbers]
        if pattern := given.get("pattern"):
            words = [pattern[n % len(pattern)] for n in numbers]
            if "sliding_attention" in words and self.get("sliding_window") is None:
                words = [word.replace("sliding_attention", "full_attention") for word in words]
            self.took("kinds of layers", pattern)
            self.by_default.add("kinds of layers")
            yield "pattern", words

    def fitted(self, name: str, words: Any, count: int) -> Sequence[str]:
        """A word for each layer; those of draft layers at the end are left out."""
        if not isinstance(words, (list, tuple)):
            raise self.refusal(name, "a list with an entry for each layer is expected")
        drafts = self.given.get("num_nextn_predict_layers") or 0
        if len(words) not in (count, count + drafts):
            raise self.refusal(name, f"it has {len(words)} entries for {count} layers")
        return words[:count]

    def kinds(self, name: str, word: str) -> Kinds:
        if word in COMPRESSED and "compress_rates" in self.given:
            word = "compressed_attention"
        if word not in KINDS:
            raise self.refusal(name, f"nobody described layers of the kind {word!r}; known: {', '.join(KINDS)}")
        return KINDS[word]

    def check_plain(self) -> None:
        """Refuse windows, chunks and recurrent states of a model that does not say which layers have them."""
        window = "sliding_window" if self.get("use_sliding_window") is not False else ""
        for name in (window, "attention_chunk_size", "index_head_dim", *(first for first, *_ in self.recurrent())):
            if name and self.get(name) and not (name == "index_head_dim" and self.get("kv_lora_rank")):
                raise self.refusal(name, "no field says which layers have it")

    def indexed(self, layers: list[Kinds], latent: bool) -> list[Kinds]:
        """Add the index keys of latents to the layers that have them."""
        if not latent or not self.get("index_head_dim"):
            return layers
        if not any("index" in kinds for kinds in layers):
            layers = [(*kinds, "index") if "full" in kinds else kinds for kinds in layers]
        modes: Sequence[str] | None = self.get("indexer_types")
        if modes is None and (pattern := self.get("index_topk_pattern")):
            modes = [{"F": "full", "S": "shared"}.get(mode, mode) for mode in pattern]
        if modes is None and (every := self.optional("index_topk_freq")):
            offset = self.get("index_skip_topk_offset")
            first = 2 if offset is None else offset
            modes = [_either(max(n - first + 1, 0) % every == 0, "full", "shared") for n in range(len(layers))]
        if modes is None:
            return layers
        modes = self.fitted("indexer_types", modes, len(layers))
        if unknown := set(modes) - {"full", "shared"}:
            raise self.refusal("indexer_types", f"'full' and 'shared' are known, got {sorted(unknown)}")
        # A layer that shares the index of a layer before it keeps no index keys.
        pairs = zip(layers, modes, strict=True)
        return [tuple(k for k in kinds if k != "index" or mode == "full") for kinds, mode in pairs]

    # Sections

    def heads(self, layers: list[Kinds], kind: Kind, own: tuple[str, str, str] | None = None) -> Attention:
        """Keys and values of the layers of one kind.

        ``own`` are the names of their heads, width and width of values, where a file has other ones for these layers.
        """
        own_heads, own_dim, own_value = own or ("num_key_value_heads", "head_dim", "v_head_dim")
        query = self.optional("num_attention_heads")
        heads = self.get(own_heads) or self.get("num_key_value_heads") or (query if self.known else None)
        dim = self.get(own_dim) or self.get("head_dim", "attention_head_dim")
        if not dim and self.known and query:
            dim, rest = divmod(self.count("hidden_size"), query)
            if rest:
                raise self.refusal("hidden_size", f"it is no multiple of {query} heads, and there is no 'head_dim'")
        value = self.get(own_value) or self.get("v_head_dim")
        for name, each in (("num_key_value_heads", heads), ("head_dim", dim)):
            if each and not isinstance(each, int):
                raise self.refusal(name, f"a whole number is expected, got {each!r:.40}")
        found: set[tuple[Any, Any, Any]] = set()
        overrides = {int(layer): each for layer, each in (self.get("per_layer_config") or {}).items()}
        for layer, kinds in enumerate(layers):
            if kind in kinds:
                over = overrides.get(layer, {})
                if unknown := set(over) - {"head_dim", "v_head_dim", "num_key_value_heads"}:
                    raise self.refusal("per_layer_config", f"it has {', '.join(sorted(unknown))}")
                keys = over.get("head_dim", dim)
                found.add((over.get("num_key_value_heads", heads), keys, over.get("v_head_dim", value) or keys))
        if len(found) > 1:
            raise self.refusal("per_layer_config", f"layers of the kind {kind!r} differ: {sorted(found)}")
        ((heads, dim, value),) = found
        for name, each in (("num_key_value_heads", heads), ("head_dim", dim)):
            if not each:
                raise self.missing(name)
        return Attention(heads=heads, dim=dim, value_dim=None if value == dim else value)

    def attention(self, layers: list[Kinds]) -> Attention:
        # Layers whose keys are their values, too, keep both, and may have heads of their own.
        heads = "num_global_key_value_heads" if self.get("attention_k_eq_v") else "num_key_value_heads"
        return self.heads(layers, "full", (heads, "global_head_dim", "v_head_dim"))

    def window(self, layers: list[Kinds]) -> Window:
        of = self.heads(layers, "window", ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"))
        return Window(**msgspec.structs.asdict(of), tokens=self.count("sliding_window", "sliding_window_size"))

    def chunk(self, layers: list[Kinds]) -> Chunk:
        of = self.heads(layers, "chunk")
        return Chunk(**msgspec.structs.asdict(of), tokens=self.count("attention_chunk_size"))

    def latent(self) -> Latent | None:
        rank = self.optional("kv_lora_rank")
        if rank is None:
            return None
        # The widths of keys and values that are computed from a latent. They are not kept.
        self.without_meaning |= {"num_key_value_heads", "head_dim", "v_head_dim"}
        return Latent(width=rank + self.count("qk_rope_head_dim"))

    def index(self, latent: bool) -> Index:
        if not latent:
            sparse = self.get("sparse_attention_config") or {}
            with_values = sparse.get("sparse_disable_index_value")
            if with_values is not None and not all(
                off for off, on in zip(with_values, sparse["sparse_attention_freq"], strict=True) if on
            ):
                raise self.refusal("sparse_attention_config", "an index with values is not described")
            width = sparse.get("sparse_index_dim") or self.count("index_head_dim")
            return Index(width=width, dtype="bfloat16", type="minimax_index_k")
        self.notes.append("An index key is float8 with a float32 scale for each key, as engines keep it.")
        return Index(width=self.count("index_head_dim"), dtype="float8_e4m3fn", scale=4)

    def compressed(self, count: int) -> Compressed:
        ratios = self.get("compress_ratios")
        if ratios is None:
            words, rates = self.get("layer_types"), self.get("compress_rates")
            if any(rates.get(word, rate) != rate for word, rate in COMPRESSED.items()):
                raise self.refusal("compress_rates", f"{COMPRESSED} are known, got {rates}")
            ratios = [COMPRESSED[word] for word in words]
        if unknown := set(ratios) - set(COMPRESSED.values()):
            known = ", ".join(map(str, COMPRESSED.values()))
            raise self.refusal("compress_ratios", f"the ratios {known} are described, got {sorted(unknown)}")
        return Compressed(
            ratios=tuple(ratios[:count]),
            width=self.count("head_dim"),
            index_width=self.count("index_head_dim"),
            window=self.count("sliding_window"),
        )

    def recurrent(self) -> list[tuple[str, Any]]:
        """The forms of recurrent layers: a field that only this form has, and the function that reads it."""
        return [
            ("linear_num_key_heads", self.gated_delta),
            ("linear_num_heads", self.kimi_delta),
            ("linear_attn_config", self.kimi_delta),
            ("mamba_n_heads", self.mamba_2),
            ("mamba_num_heads", self.mamba_2),
            ("mamba_dt_rank", self.mamba_1),
            ("linear_attn_alpha_factor", self.lightning),
            ("layernorm_linear_attention_alpha", self.lightning),
            ("conv_L_cache", self.short_convolution),
        ]

    def mamba(self) -> Mamba:
        forms = [(name, read) for name, read in self.recurrent() if self.get(name)]
        readers = list(dict.fromkeys(read for _, read in forms))
        if len(readers) != 1:
            said = f"it has {', '.join(name for name, _ in forms)}" if forms else "no known field gives their widths"
            raise self.refusal("recurrent layers", said)
        made: Mamba = readers[0]()
        return made

    def gated_delta(self) -> Mamba:
        key_heads, value_heads = self.count("linear_num_key_heads"), self.count("linear_num_value_heads")
        key, value = self.count("linear_key_head_dim"), self.count("linear_value_head_dim")
        keys = (key_heads * key, key_heads)
        return Mamba(
            conv=(keys, keys, (value_heads * value, value_heads)),
            kernel=self.count("linear_conv_kernel_dim"),
            state=(value_heads, value, key),
        )

    def kimi_delta(self) -> Mamba:
        nested = self.get("linear_attn_config") or {}
        heads = nested.get("num_heads") or self.count("linear_num_heads")
        dim = nested.get("head_dim") or self.count("linear_head_dim")
        kernel = nested.get("short_conv_kernel_size") or self.count("linear_conv_kernel_dim")
        return Mamba(conv=((heads * dim, heads),) * 3, kernel=kernel, state=(heads, dim, dim))

    def mamba_2(self) -> Mamba:
        heads = self.count("mamba_n_heads", "mamba_num_heads")
        dim = self.get("mamba_d_head", "mamba_head_dim")
        if dim is None or dim == "auto":
            inner = self.get("mamba_d_ssm") or self.count("mamba_expand", "expand") * self.count("hidden_size")
            dim = inner // heads
        self.get("mamba_d_ssm"), self.get("mamba_expand", "expand")  # say the same again
        groups = self.count("mamba_n_groups", "n_groups")
        state = self.count("mamba_d_state", "ssm_state_size")
        shared = (groups * state, groups)
        return Mamba(
            conv=((heads * dim, heads), shared, shared),
            kernel=self.count("mamba_d_conv", "conv_kernel"),
            state=(heads, dim, state),
        )

    def mamba_1(self) -> Mamba:
        inner = self.count("mamba_expand") * self.count("hidden_size")
        return Mamba(
            conv=((inner, inner),), kernel=self.count("mamba_d_conv"), state=(inner, self.count("mamba_d_state"))
        )

    def lightning(self) -> Mamba:
        heads = self.count("num_attention_heads")
        dim = self.optional("head_dim") or self.count("hidden_size") // heads
        return Mamba(state=(heads, dim, dim))

    def short_convolution(self) -> Mamba:
        width = self.count("hidden_size")
        return Mamba(conv=((width, width),), kernel=self.count("conv_L_cache"))

    def dtypes(self) -> dict[str, Dtype]:
        """Element types that the configuration gives."""
        found: dict[str, Dtype] = {}
        for field, names in (
            ("dtype", ("dtype", "torch_dtype")),
            ("state_dtype", ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")),
        ):
            value = self.get(*names)
            if value is None and field == "dtype":
                value = self.whole.get("dtype") or self.whole.get("torch_dtype")
            if value is None:
                continue
            plain = str(value).removeprefix("torch.")
            if plain not in DTYPES:
                raise self.refusal(names[0], f"{', '.join(DTYPES)} are known, got {value!r:.40}")
            found[field] = DTYPES[plain]
        if "dtype" in found:
            found["conv_dtype"] = found["dtype"]
        quantized = self.whole.get("quantization_config") or self.given.get("quantization_config") or {}
        scheme = quantized.get("kv_cache_scheme") or quantized.get("kv_cache_quant_algo")
        if scheme is not None:
            eight = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
            if not eight and str(scheme).upper() != "FP8":
                raise self.refusal(
                    "quantization_config", f"keys and values are quantised in a way that is not known: {scheme}"
                )
            found["dtype"] = "float8_e4m3fn"
            self.read["quantization_config"] = scheme
        return found


def _short(value: Any) -> str:
    """A value of a field. Of a list, how often it has each entry."""
    if isinstance(value, dict):
        return f"({', '.join(f'{name} {_short(each)}' for name, each in value.items())})"
    if isinstance(value, list):
        counts = Counter(map(str, value))
        return f"[{', '.join(f'{count} × {entry}' for entry, count in counts.items())}]"
    return str(value)


def _either(condition: bool, this: str, that: str) -> str:
    return this if condition else that


def _shortest(layers: list[Kinds]) -> tuple[Kind | Kinds, ...]:
    """The shortest list that, repeated, gives what all layers keep."""
    for length in range(1, len(layers) + 1):
        if all(kinds == layers[n % length] for n, kinds in enumerate(layers)):
            break
    return tuple(kinds[0] if len(kinds) == 1 else kinds for kinds in layers[:length])
