"""Networks that draw in training: the honest ones with their dropout on, and others that draw."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.mbs.honest import families, inside, networks
from benchmarks.mbs.honest.families import FAMILIES, IDS, SIZE
from benchmarks.mbs.honest.networks import C, D, Net, T, V, conv, linear, pooled, words
from benchmarks.mbs.honest.subjects import (
    ROWS,
    SUBJECTS,
    Problem,
    Subject,
    classes,
    rows,
    squared,
    tokens,
    values,
)

RATE = 0.2
"""Every rate of a configuration whose name speaks of dropping."""

BLOCKS = networks.__name__, inside.__name__
"""The modules that register when they are imported."""

FOUND: dict[str, Subject] = {}


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute in the body."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def network(name: str, group: str) -> Callable[[Callable[[], Problem]], Callable[[], Problem]]:
    """Register the function below, which returns a `Problem`."""

    def register(make: Callable[[], Problem]) -> Callable[[], Problem]:
        assert name not in FOUND, name
        FOUND[name] = Subject(name, group, make, rng="batch")
        return make

    return register


def register() -> None:
    """Fill `FOUND`."""
    for name, make in FAMILIES.items():
        FOUND.setdefault(name, Subject(name, "transformers", _drawing(make), rng="batch"))
    for name, one in SUBJECTS.items():
        if one.rng == "batch":
            FOUND.setdefault(name, one)


# --- families of Transformers


def _drawing(make: Callable[[], Problem]) -> Callable[[], Problem]:
    def run() -> Problem:
        with swapped(families, "_made", made):
            return make()

    return run


def made(model: str, config: str, /, **options: Any) -> nn.Module:
    """A model with every rate of dropping at `RATE`."""
    import transformers

    eager = options.pop("eager", False)
    settings = getattr(transformers, config)(**options)
    if eager:
        settings._attn_implementation = "eager"
    settings._experts_implementation = "eager"
    _drop(settings)
    found: nn.Module = getattr(transformers, model)(settings)
    return found.train()


def _drop(settings: Any) -> None:
    for name, value in vars(settings).items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(Exception):  # some are checked, and are integers
                setattr(settings, name, RATE)
        elif hasattr(value, "to_dict"):
            _drop(value)


class Named(nn.Module):
    """A model called by names; its scores, or else its last hidden states."""

    def __init__(self, inner: nn.Module, *names: str, wanted: str) -> None:
        super().__init__()
        self.inner, self.names, self.wanted = inner, names, wanted

    def forward(self, *inputs: Tensor) -> Tensor:
        """Tensors of n rows -> [n, ...]."""
        named = dict(zip(self.names, inputs, strict=True))
        found: Tensor = getattr(self.inner(**named), self.wanted)
        return found


def family(
    name: str, model: str, inputs: Callable[[], dict[str, Tensor]], /, *options: Mapping[str, Any]
) -> None:
    """Register a model of Transformers whose outputs are drawn to random numbers."""
    settings = {key: value for some in options for key, value in some.items()}
    wanted = settings.pop("wanted", "logits")

    def make() -> Problem:
        import transformers

        named, config = inputs(), getattr(transformers, model).config_class.__name__
        found = Named(made(model, config, **settings), *named, wanted=wanted)
        with torch.no_grad():
            shape = found(*named.values()).shape
        return values(found, tuple(named.values()), *shape[1:])

    network(name, "transformers")(make)


def _ids(length: int = 6) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"input_ids": torch.randint(3, families.V, (ROWS, length))}


def _named(name: str, *shape: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(ROWS, *shape)}


def _pair(length: int, first: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {**first(), "decoder_input_ids": words(length)}


def _episodes() -> dict[str, Tensor]:
    widths = {"states": 3, "actions": 2, "rewards": 1, "returns_to_go": 1}
    found = {name: torch.randn(ROWS, 4, width) for name, width in widths.items()}
    times, mask = torch.arange(4).repeat(ROWS, 1), torch.ones(ROWS, 4)
    return {**found, "timesteps": times, "attention_mask": mask}


SOUND_INPUTS = _named("input_values", 400)
SMALL, IMAGES = (_named("pixel_values", 3, side, side) for side in (16, 32))
FRAMES = _named("pixel_values", 4, 3, 16, 16)

W = families.D
WORDS = {"vocab_size": families.V}
HIDDEN = {"wanted": "last_hidden_state"}
SOUND = (
    {"hidden_size": W, "intermediate_size": W, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"vocab_size": 11, "conv_dim": (8, 8), "conv_kernel": (10, 8), "conv_stride": (5, 4)}
    | {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
    | {"num_conv_pos_embedding_groups": 2}
)
UNMASKED = {**SOUND, "mask_time_prob": 0.0}
VIEWED, VIDEOS = families.PATCHES, {**HIDDEN, **families.PATCHES, "num_frames": 4}
BOTH = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": W, "d_model": W} | {
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": W,
}
RESNET = {"model_type": "resnet", "layer_type": "basic", "embedding_size": 4} | {
    "hidden_sizes": [4, 8],
    "depths": [1, 1],
    "out_features": ["stage2"],
}
family("Wav2Vec2, no masks", "Wav2Vec2ForCTC", SOUND_INPUTS, UNMASKED)
family(
    *("Wav2Vec2, spec augment", "Wav2Vec2ForCTC", SOUND_INPUTS),
    {**SOUND, "mask_time_prob": 0.2, "mask_time_length": 2},
)
family("HuBERT", "HubertForCTC", SOUND_INPUTS, UNMASKED)
family("WavLM", "WavLMForCTC", SOUND_INPUTS, UNMASKED)
family(
    *("Whisper", "WhisperForConditionalGeneration", _pair(4, _named("input_features", 8, 16))),
    {**BOTH, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8, "vocab_size": V},
    {"max_source_positions": 8, "max_target_positions": 8, **IDS, "decoder_start_token_id": 1},
)
family("CLIP vision", "CLIPVisionModel", SMALL, HIDDEN, VIEWED)
family("CLIP text", "CLIPTextModel", _ids(), HIDDEN, SIZE, IDS)
family("SigLIP vision", "SiglipVisionModel", SMALL, HIDDEN, VIEWED)
family(
    *("ViTMAE", "ViTMAEForPreTraining", SMALL),
    {**VIEWED, "decoder_hidden_size": W, "decoder_intermediate_size": W},
    {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
)
family("VideoMAE", "VideoMAEModel", FRAMES, VIDEOS)
family("TimeSformer", "TimesformerModel", FRAMES, VIDEOS)
family("ViViT", "VivitModel", FRAMES, {**VIDEOS, "tubelet_size": [2, 4, 4]})
family(
    *("Switch", "SwitchTransformersEncoderModel", _ids()),
    {**HIDDEN, **families.T5, "num_experts": 4, "expert_capacity": 64, "num_layers": 2},
    {"router_jitter_noise": 0.1, "num_sparse_encoder_layers": 1},
)
family(
    *("Mixtral, jitter", "MixtralForCausalLM", _ids()),
    {**families.LLAMA, "num_local_experts": 4, "router_jitter_noise": 0.1},
)
family(
    *("Perceiver", "PerceiverModel", _named("inputs", 6, W)),
    {**HIDDEN, "d_model": W, "d_latents": W, "num_latents": 3, "num_self_attends_per_block": 1},
    {"num_self_attention_heads": 2, "num_cross_attention_heads": 2},
)
family("Longformer", "LongformerForMaskedLM", _ids(8), {**SIZE, **IDS, "attention_window": 4})
family(
    *("BigBird, sparse", "BigBirdForMaskedLM", _ids(32)),
    {**SIZE, **IDS, "max_position_embeddings": 64, "attention_type": "block_sparse"},
    {"block_size": 4, "num_random_blocks": 1},
)
family(
    *("Reformer", "ReformerForMaskedLM", _ids(16)),
    {**WORDS, "hidden_size": W, "feed_forward_size": W, "num_attention_heads": 2},
    {"attention_head_size": 8, "attn_layers": ["local", "lsh"], "is_decoder": False},
    {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [8, 8], "max_position_embeddings": 16},
    {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 4},
    {"num_hashes": 1, "hash_seed": None},
)
family(
    *("XLNet", "XLNetLMHeadModel", _ids()),
    {**WORDS, "d_model": W, "n_layer": 2, "n_head": 2, "d_inner": W},
)
family(
    *("Funnel", "FunnelForMaskedLM", _ids(8)),
    {**WORDS, "block_sizes": [1, 1], "num_decoder_layers": 1},
    {"d_model": W, "n_head": 2, "d_head": 8, "d_inner": W},
)
family("DeBERTa", "DebertaForMaskedLM", _ids(), SIZE, {"eager": True})
family("RoFormer", "RoFormerForMaskedLM", _ids(), SIZE, {"embedding_size": W})
family("FNet", "FNetForMaskedLM", _ids(), SIZE)
family(
    *("Nystromformer", "NystromformerForMaskedLM", _ids(8)),
    {**SIZE, "num_landmarks": 4, "segment_means_seq_len": 8},
)
family("I-BERT", "IBertForMaskedLM", _ids(), SIZE)
family(
    *("MobileBERT", "MobileBertForMaskedLM", _ids()),
    {**SIZE, "embedding_size": W, "intra_bottleneck_size": W, "true_hidden_size": W},
)
family("SqueezeBERT", "SqueezeBertForMaskedLM", _ids(), SIZE, {"embedding_size": W})
family(
    *("ConvBERT", "ConvBertForMaskedLM", _ids(8)),
    {**SIZE, "embedding_size": W, "num_attention_heads": 4, "conv_kernel_size": 3},
)
family(
    *("XLM", "XLMWithLMHeadModel", _ids()),
    {**WORDS, "n_words": families.V, "emb_dim": W, "n_layers": 2, "n_heads": 2},
    {"max_position_embeddings": 32},
)
family(
    *("CTRL", "CTRLLMHeadModel", _ids()),
    {**WORDS, "n_embd": W, "n_layer": 2, "n_head": 2, "dff": W, "n_positions": 32},
)
family("GPT-BigCode", "GPTBigCodeForCausalLM", _ids(), families.GPT)
family("CodeGen", "CodeGenForCausalLM", _ids(), {**families.GPT, "n_head": 4, "rotary_dim": 4})
family(
    *("RWKV", "RwkvForCausalLM", _ids()),
    {**WORDS, **IDS, "hidden_size": W, "num_hidden_layers": 2, "context_length": 16},
)
family(
    *("LED", "LEDForConditionalGeneration", _pair(4, lambda: {"input_ids": words(8)})),
    {**families.BART, "attention_window": 4, "decoder_start_token_id": 1},
    {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
)
family(
    *("SegFormer", "SegformerForSemanticSegmentation", IMAGES),
    {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]},
    {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2]},
    {"mlp_ratios": [2, 2], "decoder_hidden_size": 8},
)
family(
    *("Swin v2", "Swinv2ForImageClassification", SMALL),
    {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2]},
    {"window_size": 4},
)
family(
    *("FocalNet", "FocalNetForImageClassification", SMALL),
    {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1]},
    {"focal_levels": [1, 1], "focal_windows": [3, 3]},
)
family(
    *("PVT", "PvtForImageClassification", IMAGES),
    {"image_size": 32, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    {"num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]},
)
family(
    "ConvNeXt v2", "ConvNextV2ForImageClassification", IMAGES, families.STAGES, {"num_stages": 2}
)
family(
    *("EfficientNet", "EfficientNetForImageClassification", IMAGES),
    {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
)
family(
    *("MobileViT", "MobileViTForImageClassification", IMAGES),
    {"image_size": 32, "hidden_sizes": [8, 8, 8], "num_attention_heads": 2},
    {"neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 8]},
)
family("Data2Vec vision", "Data2VecVisionForImageClassification", SMALL, VIEWED)
family(
    *("DETR", "DetrForObjectDetection", IMAGES),
    {**BOTH, "num_queries": 3, "use_timm_backbone": False, "use_pretrained_backbone": False},
    {"backbone": None, "backbone_config": RESNET},
)
family(
    *("PatchTST, masks", "PatchTSTForPretraining", _named("past_values", 16, 2)),
    {"wanted": "prediction_output", "num_input_channels": 2, "context_length": 16},
    {"patch_length": 4, "patch_stride": 4, "num_hidden_layers": 1, "d_model": W},
    {"num_attention_heads": 2, "ffn_dim": W, "random_mask_ratio": 0.4},
    {"norm_type": "layernorm"},
)
family("SEW", "SEWForCTC", SOUND_INPUTS, UNMASKED, {"squeeze_factor": 2})
family(
    *("Decision transformer", "DecisionTransformerModel", _episodes),
    {"wanted": "action_preds", "state_dim": 3, "act_dim": 2, "hidden_size": W},
    {"n_layer": 1, "n_head": 2, "max_ep_len": 8},
)

# --- networks written here


def _second(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


@network("ResNet with dropout of channels", "written here")
def _channels() -> Problem:
    body = nn.Sequential(conv(D, D), nn.ReLU(), nn.Dropout2d(0.3), conv(D, D))
    return classes(
        nn.Sequential(conv(), networks.Residual(body), nn.ReLU(), *pooled()), rows(3, 8, 8)
    )


LAYERS: dict[str, Any] = {"stem": lambda: linear(6), "head": lambda: linear(D, C)}
IMAGE_LAYERS: dict[str, Any] = {"stem": conv, "head": lambda: nn.Sequential(*pooled())}


def _net(name: str, body: Callable[..., Any], inputs: Any = None, **layers: Any) -> None:
    """Register a network; its layers are made in this order, and `LAYERS` follow without a head."""
    layers = layers if "head" in layers else {**layers, **LAYERS}

    def make() -> Problem:
        built = {key: value() for key, value in layers.items()}
        made_inputs = rows(6) if inputs is None else inputs()
        return squared(Net(body, **built), made_inputs)

    network(name, "written here")(make)


def _tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: rows(*shape)


def _between(name: str, noise: Callable[[Tensor], Tensor], *shape: int) -> None:
    """A stem, what draws, and a head."""
    inputs = _tokens(*shape, 6) if shape else None
    _net(name, lambda m, x: m.head(noise(m.stem(x).tanh())), inputs)


def _path(x: Tensor) -> Tensor:
    return x + x.sin() * x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.7) / 0.7


def _beta(n: int) -> Any:
    ratios: Any = torch.distributions.Beta(1.0, 1.0)
    return ratios.sample((n, 1))


def _mixed(x: Tensor, a: Tensor) -> Tensor:
    return a * x.sin() + (1 - a) * x.cos()


def _twice(x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    one, other = part(torch.cat([x, x])).chunk(2)
    return one.sin() + other.tanh()


def _crops(x: Tensor) -> Tensor:
    crops = _path(torch.cat([x[:, :3], x[:, 1:4], x[:, 2:]]))
    return sum(crop.mean(1) for crop in crops.chunk(3))  # type: ignore[return-value]


def _edges(x: Tensor) -> Tensor:
    n = len(x)
    source = torch.arange(n * T)
    target = source // T * T + (source + 1) % T
    retained = (torch.rand(n * T) > 0.3)[:, None]
    return (
        torch.zeros_like(x.flatten(0, 1))
        .index_add(0, target, x.flatten(0, 1) * retained)
        .view(x.shape)
    )


def _noised(x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    a = (t / 10)[:, None]
    return (1 - a).sqrt() * x + a.sqrt() * noise


def _block(x: Tensor) -> Tensor:
    dropped = (torch.rand(len(x), 1, *x.shape[2:]) < 0.05).double()
    return x * (1 - F.max_pool2d(dropped, 3, 1, 1))


def _shifted(x: Tensor) -> Tensor:
    eye = torch.eye(2, 3).to(x).expand(len(x), 2, 3).clone()
    eye[:, :, 2] = torch.rand(len(x), 2) - 0.5
    return F.grid_sample(
        x, F.affine_grid(eye, list(x.shape), align_corners=False), align_corners=False
    )


_between("stochastic depth of samples", _path)
_between("RReLU", lambda x: F.rrelu(x, training=True))
_between("feature alpha dropout", lambda x: F.feature_alpha_dropout(x, 0.3, training=True), T)
_between("mixup in forward", lambda x: 0.7 * x + 0.3 * x.detach()[torch.randperm(len(x))])
_between("mixup of ratios", lambda x: x * _beta(len(x)))
_between("Gaussian noise", lambda x: x + 0.1 * torch.randn_like(x), T)
_between("multiplicative noise", lambda x: x * torch.normal(1.0, 0.3, x.shape), T)
_between("Gumbel softmax", lambda x: x * F.gumbel_softmax(x, 0.7, hard=True), T)
_between("token dropout", lambda x: x * (torch.rand(x.shape[:2]) > 0.3).unsqueeze(-1), T)
_between(
    "random masking by an order",
    lambda x: x.gather(1, torch.rand(x.shape[:2]).argsort(1)[:, :3, None].expand(-1, -1, D)),
    T,
)
_between("shake-shake", lambda x: _mixed(x, torch.rand(len(x), 1)))
_between(
    "policy that samples",
    lambda x: x * torch.distributions.Categorical(logits=x.detach()).sample()[:, None],  # type: ignore[no-untyped-call]
)
_between(
    "locked dropout, time first",
    lambda x: _second(_second(x) * x.new_empty(1, len(x), D).bernoulli_(0.7)),
    T,
)
_between("dropout, time first", lambda x: _second(F.dropout(_second(x).contiguous(), 0.3)), T)
_between(
    "dropout, time and samples in one", lambda x: F.dropout(x.flatten(0, 1), 0.3).view(x.shape), T
)
_between(
    "dropout, time before samples in one",
    lambda x: _second(F.dropout(_second(x).flatten(0, 1), 0.3).view(x.shape[1], len(x), D)),
    T,
)
_between("R-Drop: samples twice", lambda x: _twice(x, lambda b: F.dropout(b, 0.3)))
_between(
    "SimCSE: pairs of samples",
    lambda x: F.dropout(torch.stack([x, x], 1).flatten(0, 1), 0.3).view(len(x), 2, D).sin().sum(1),
)
_between("multi-crop with drop path", _crops, T)
_between(
    "IWAE: samples of a posterior",
    lambda x: torch.distributions.Normal(x, 1.0).rsample((3,)).tanh().mean(0),
)
_between(
    "Monte Carlo dropout, repeated",
    lambda x: F.dropout(x.repeat(3, 1), 0.3).view(3, len(x), D).tanh().mean(0),
)
_between(
    "Monte Carlo dropout, interleaved",
    lambda x: F.dropout(x.repeat_interleave(3, 0), 0.3).view(len(x), 3, D).tanh().mean(1),
)
_between("scheduled coin of Python", lambda x: x.sin() if random.random() < 0.5 else x.cos())
_between("a noise for all samples", lambda x: x + torch.randn(D), T)
_between(
    "SpecAugment by torch",
    lambda x: x * ((torch.arange(T) - torch.randint(T, (len(x), 1))).abs() > 1)[..., None],
    T,
)
_between(
    "dropout of a graph's edges, dense", lambda x: (torch.rand(len(x), T, T) > 0.3).double() @ x, T
)
_between("dropout of a graph's edges, shared", lambda x: (torch.rand(T, T) > 0.3).double() @ x, T)
_between("dropout of a graph's edges, as a list", _edges, T)


_net("DropConnect, one mask", lambda m, x: m.head(x @ F.dropout(m.stem.weight, 0.3).T))
_net(
    "DropConnect, a mask a sample",
    lambda m, x: m.head(
        torch.einsum("ni,noi->no", x, m.stem.weight * (torch.rand(len(x), D, 6) > 0.3))
    ),
)
_net(
    "embedding dropout",
    lambda m, x: m.head(F.embedding(x, F.dropout2d(m.table.weight[None, :, None], 0.3)[0, :, 0])),
    words,
    table=lambda: nn.Embedding(V, D),
    head=lambda: linear(D, C),
)
_net(
    "generator of a GAN",
    lambda m, x: m.head((m.stem(x) + m.noise(x.new_empty(len(x), 4).normal_())).relu()),
    noise=lambda: linear(4),
)
_net(
    "critic with a gradient penalty",
    lambda m, x: m.head(m.stem(x + torch.rand(len(x), 1) * (torch.randn_like(x) - x)).tanh()),
)
_net(
    "diffusion, noise and times in forward",
    lambda m, x: m.head(
        m.stem(_noised(x, torch.randint(9, (len(x),)), torch.randn_like(x))).sigmoid()
    ),
)


_net(
    "VQ-VAE with random codes",
    lambda m, x: m.head(m.stem(x) + m.codes(torch.randint(5, (len(x),)))),
    codes=lambda: nn.Embedding(5, D),
)
_net(
    "NeRF, stratified rays",
    lambda m, x: m.head(
        m.stem(x[:, None] * (torch.linspace(0, 1, T) + torch.rand(len(x), T) / T)[..., None])
        .relu()
        .mean(1)
    ),
)
_net(
    "regions of images with dropout",
    lambda m, x: m.head(F.dropout(m.stem(x.flatten(0, 1)).relu(), 0.3)).view(len(x), T, C).sum(1),
    _tokens(T, 6),
)
_net(
    "frames of videos with dropout of channels",
    lambda m, x: m.head(F.dropout2d(m.stem(x.flatten(0, 1)), 0.3)).view(len(x), 3, C).mean(1),
    _tokens(3, 3, 8, 8),
    **IMAGE_LAYERS,
)
_net("DropBlock", lambda m, x: m.head(_block(m.stem(x).relu())), _tokens(3, 8, 8), **IMAGE_LAYERS)


_net(
    "random crops by offsets",
    lambda m, x: m.head(m.stem(_shifted(x))),
    _tokens(3, 8, 8),
    **IMAGE_LAYERS,
)


def _transformer(*, batch_first: bool) -> None:
    def body(m: Any, x: Tensor) -> Any:
        x = x if batch_first else _second(x)
        found = m.part(x, x)
        return m.head(found if batch_first else _second(found))

    _net(
        f"nn.Transformer, {'samples' if batch_first else 'time'} first",
        body,
        _tokens(T, D),
        part=lambda: nn.Transformer(D, 2, 1, 1, 2 * D, 0.2, batch_first=batch_first),
        head=lambda: linear(D, C),
    )


def _recurrent(kind: Any, *, batch_first: bool) -> None:
    def make() -> Problem:
        def body(m: Any, x: Tensor) -> Any:
            x = m.drop(m.words(x))
            found = m.part(x if batch_first else _second(x))[0]
            return m.head(m.drop(found if batch_first else _second(found)))

        net = Net(
            body,
            words=nn.Embedding(V, D),
            drop=nn.Dropout(0.3),
            part=kind(D, D, 2, dropout=0.3, batch_first=batch_first),
            head=linear(D, V),
        )
        return tokens(net, words(), T, V)

    network(f"{kind.__name__}, {'samples' if batch_first else 'time'} first", "written here")(make)


for _first in (True, False):
    _transformer(batch_first=_first)
    _recurrent(nn.LSTM, batch_first=_first)
_recurrent(nn.GRU, batch_first=False)
