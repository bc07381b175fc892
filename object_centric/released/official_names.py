"""Names of the official repositories of SAVi, ISA, PSB, STEVE and OSRT, mapped to the names of the same modules here.

A name of the official repository (left) stands for a module or parameter, `{i}` for a number. Ours (right) is below `model.` in a run's state
dict; `{2i}` is twice that number. None of these repositories releases weights in a file that can be read without its own software, so
this project has no reader for them: the maps are for porting weights, and for reading their code and ours side by side.

Differences of layout that the maps do not show:

- flax (SAVi, ISA): `kernel` is `weight` transposed, (in, out) for Dense, HWIO for Conv; a transposed convolution's kernel is also flipped in
  both spatial axes. `scale` is `weight`. Attention has (in, heads, width) kernels; heads come first in our flat rows.
- GRUCell: `weight_ih` is [ir; iz; in] and `weight_hh` [hr; hz; hn]; in flax only `hn` of the hidden ones has a bias.
- Position embeddings are layers of coordinates, whose order and range differ: (y, x) in -1..1 for SAVi and ISA, (x, y, 1 - x, 1 - y) for
  STEVE, (x, y, -x, -y) for PSB. Grids and causal masks (`pos_embedding`, `pe`, `self_attn_mask`, `causal_mask`) are computed here.
- `to_qkv` and `to_kv` (OSRT) are q, k and v one below the other.
"""

from __future__ import annotations

from collections.abc import Mapping


def _join_maps(*parts: tuple[str, str, Mapping[str, str]]) -> dict[str, str]:
    """Return one map from parts that have a common beginning on either side."""
    return {theirs + a: ours + b for theirs, ours, names in parts for a, b in names.items()}


def _attention(theirs: str, ours: str) -> dict[str, str]:
    """Return the map of the projections of an attention in PSB's and STEVE's code."""
    return {f"{theirs}.proj_{x}": f"{ours}to_{x}" for x in "qkv"} | {f"{theirs}.proj_o": f"{ours}out"}


_FLAX_RESNET = {
    "init_conv": "stem",
    "init_bn": "norm",
    # Blocks are numbered through all stages here.
    "stage{s}/block{b}/conv1": "blocks.{i}.conv1",
    "stage{s}/block{b}/conv2": "blocks.{i}.conv2",
    "stage{s}/block{b}/bn1": "blocks.{i}.norms.0",
    "stage{s}/block{b}/bn2": "blocks.{i}.norms.1",
    "stage{s}/block{b}/proj_conv": "blocks.{i}.downsample",
    "stage{s}/block{b}/proj_bn": "blocks.{i}.downsample_norm",
}
_FLAX_TRANSFORMER_BLOCK = {
    "MultiHeadDotProductAttention_0/query": "to_q",
    "MultiHeadDotProductAttention_0/key": "to_k",
    "MultiHeadDotProductAttention_0/value": "to_v",
    "MultiHeadDotProductAttention_0/out": "out",
    "LayerNorm_0": "norm_attention",
    "LayerNorm_1": "norm_mlp",
    "MLP_0/dense_mlp_0": "mlp.0",
    "MLP_0/dense_mlp_1": "mlp.2",
}
_FLAX_POSITION_MLP = {
    "PositionEmbedding_0/dense_pe_0": "position",
    "PositionEmbedding_0/MLP_0/LayerNorm_0": "norm",
    "PositionEmbedding_0/MLP_0/dense_mlp_0": "project.0",
    "PositionEmbedding_0/MLP_0/dense_mlp_1": "project.2",
}

# google-research/slot-attention-video: SAVi-S and SAVi-M (CNN_0), SAVi-L (ResNet_0).
SAVI: Mapping[str, str] = _join_maps(
    ("FrameEncoder_0/CNN_0/", "tower.encoder.", {"conv_{i}": "layers.{i}"}),
    ("FrameEncoder_0/ResNet_0/", "tower.encoder.", _FLAX_RESNET),
    ("FrameEncoder_0/", "tower.", _FLAX_POSITION_MLP),
    ("CoordinateEncoderStateInit_0/MLP_0/", "tower.hint.", {"dense_mlp_0": "mlp.0", "dense_mlp_1": "mlp.2"}),
    (
        "SlotAttention_0/",
        "tower.grouping.step.corrector.",
        {
            "LayerNorm_0": "rounds.0.norm_slots",
            "LayerNorm_1": "norm_input",
            "general_dense_q_0": "rounds.0.to_q",
            "general_dense_k_0": "rounds.0.to_k",
            "general_dense_v_0": "rounds.0.to_v",
            "GRU_0/GRUCell_0": "rounds.0.gru",
        },
    ),
    ("TransformerBlock_0/", "tower.grouping.step.predictor.0.", _FLAX_TRANSFORMER_BLOCK),
    (
        "SpatialBroadcastDecoder_0/",
        "decoder.",
        {
            "PositionEmbedding_0/dense_pe_0": "position",
            "CNN_0/conv_{i}": "layers.{2i}",
            # One layer here: first the rows of the target, last that of the masks.
            "Readout_0/Dense_0/Dense_0 + alpha_logits": "layers.8",
        },
    ),
)

# google-research/google-research, invariant_slot_attention: translation, and translation and scale.
ISA: Mapping[str, str] = _join_maps(
    ("FrameEncoder_0/SimpleCNN_0/", "tower.encoder.", {"conv_simple_{i}": "layers.{i}"}),
    ("FrameEncoder_0/ResNet_0/", "tower.encoder.", _FLAX_RESNET),
    ("ParamStateInitRandomPositionsScales_0/", "tower.grouping.", {"state_init": "initial_slots"}),
    (
        "SlotAttentionTranslScaleEquiv_0/",
        "tower.grouping.",
        {
            # The other way round than in SAVi's SlotAttention_0.
            "LayerNorm_0": "norm_input",
            "LayerNorm_1": "norm_slots",
            "general_dense_q_0": "to_q",
            "general_dense_k_0": "to_k",
            "general_dense_v_0": "to_v",
            "dense_gp_0": "grid_proj",
            "MLP_0/LayerNorm_0": "grid_enc.0",
            "MLP_0/dense_mlp_0": "grid_enc.1",
            "MLP_0/dense_mlp_1": "grid_enc.3",
            "GRU_0/GRUCell_0": "gru",
            "MLP_1/LayerNorm_0": "norm_mlp",
            "MLP_1/dense_mlp_0": "mlp.0",
            "MLP_1/dense_mlp_1": "mlp.2",
        },
    ),
    (
        "SiameseSpatialBroadcastDecoder_0/",
        "decoder.",
        {
            "RelativePositionEmbedding_0/dense_pe_0": "position",
            "CNN_0/conv_{i}": "layers.{2i}",
            "Readout_0/MLP_0/dense_mlp_0 + alphas": "layers.10",
        },
    ),
)

# NVlabs/PSB, with the spatial broadcast decoder.
PSB: Mapping[str, str] = _join_maps(
    (
        "encoder.",
        "tower.",
        {
            "slot_init": "grouping.initial_slots",
            "encoder_cnn.{2i}": "encoder.layers.{i}",
            "encoder_pos.projection": "position",
            "layer_norm": "norm",
            "mlp.0": "project.0",
            "mlp.2": "project.2",
            "binder.norm": "grouping.norm",
        },
    ),
    (
        "encoder.binder.blocks.{i}.",
        "tower.grouping.blocks.{i}.",
        {
            "relpos_mlp.1": "distance.0",
            "relpos_mlp.3": "distance.2",
            "norm_cross_attn_input": "norm_slots",
            "norm_cross_attn_cond": "norm_input",
            **_attention("cross_attn", ""),
            "norm_self_attn_across_time": "norm_time",
            **_attention("self_attn_across_time", "across_time."),
            "norm_self_attn": "norm_self_attention",
            **_attention("self_attn", "self_attention."),
            "norm_ffn": "norm_mlp",
            "ffn.0": "mlp.0",
            "ffn.2": "mlp.2",
        },
    ),
    (
        "decoder.",
        "decoder.",
        {
            "slots_norm": "norms.0",
            "decoder_pos.projection": "position",
            "decoder_cnn.0": "norms.1",
            "decoder_cnn.{2i+1}": "layers.{2i}",
        },
    ),
)

# singhgautam/steve. Its dvae.py could not be read; the names of that part are those of the author's SLATE, with convolutions that have biases.
STEVE: Mapping[str, str] = _join_maps(
    (
        "dvae.",
        "dvae.",
        {
            "encoder.{i}.m": "encoder.{i}.conv",
            "encoder.7": "encoder.7",
            "decoder.{i}.m": "decoder.{i}.conv",
            "decoder.11": "decoder.11",
        },
    ),
    (
        "steve_encoder.",
        "tower.",
        {
            "cnn.{i}.m": "encoder.layers.{i}",
            "cnn.3": "encoder.layers.3",
            "pos.projection": "position",
            "layer_norm": "norm",
            "mlp.0": "project.0",
            "mlp.2": "project.2",
        },
    ),
    (
        "steve_encoder.savi.",
        "tower.grouping.step.corrector.",
        {
            "slot_mu": "mu",
            "slot_log_sigma": "log_sigma",
            "norm_inputs": "norm_input",
            "norm_slots": "rounds.0.norm_slots",
            "norm_mlp": "rounds.0.norm_mlp",
            "project_q": "rounds.0.to_q",
            "project_k": "rounds.0.to_k",
            "project_v": "rounds.0.to_v",
            "gru": "rounds.0.gru",
            "mlp.0": "rounds.0.mlp.0",
            "mlp.2": "rounds.0.mlp.2",
        },
    ),
    (
        "steve_encoder.savi.predictor.",
        "tower.grouping.step.predictor.",
        {
            "blocks.{i}.attn_layer_norm": "{i}.norm_attention",
            **_attention("blocks.{i}.attn", "{i}."),
            "blocks.{i}.ffn_layer_norm": "{i}.norm_mlp",
            "blocks.{i}.ffn.0": "{i}.mlp.0",
            "blocks.{i}.ffn.2": "{i}.mlp.2",
            "layer_norm": "1",  # after the only block
        },
    ),
    ("steve_encoder.", "", {"slot_proj": "project"}),
    (
        "steve_decoder.",
        "",
        {
            "dict.dictionary": "embed",
            "bos": "bos",
            "pos.pe": "pos_embed",
            "tf.blocks.{i}.self_attn_layer_norm": "decoder.blocks.{i}.norm_tokens",
            **_attention("tf.blocks.{i}.self_attn", "decoder.blocks.{i}.to_tokens."),
            "tf.blocks.{i}.encoder_decoder_attn_layer_norm": "decoder.blocks.{i}.norm_slots",
            **_attention("tf.blocks.{i}.encoder_decoder_attn", "decoder.blocks.{i}.to_slots."),
            "tf.blocks.{i}.ffn_layer_norm": "decoder.blocks.{i}.norm_mlp",
            "tf.blocks.{i}.ffn.0": "decoder.blocks.{i}.mlp.0",
            "tf.blocks.{i}.ffn.2": "decoder.blocks.{i}.mlp.2",
            "tf.layer_norm": "decoder.norm",
            "head": "head",
        },
    ),
)

# stelzner/osrt: the improved SRT encoder, its slot attention, and the slot mixer of five render layers.
OSRT: Mapping[str, str] = _join_maps(
    (
        "encoder.srt_encoder.",
        "tower.encoder.",
        {
            "conv_blocks.0.layers.0": "stem",
            "conv_blocks.{i}.layers.{j}": "blocks.{k}",
            "per_patch_linear": "project",
            "transformer.layers.{i}.0.norm": "transformer.{i}.norm_attention",
            "transformer.layers.{i}.0.fn.to_qkv": "transformer.{i}.to_q + to_k + to_v",
            "transformer.layers.{i}.0.fn.to_out.0": "transformer.{i}.out",
            "transformer.layers.{i}.1.norm": "transformer.{i}.norm_mlp",
            "transformer.layers.{i}.1.fn.net.0": "transformer.{i}.mlp.0",
            "transformer.layers.{i}.1.fn.net.3": "transformer.{i}.mlp.2",
        },
    ),
    (
        "encoder.slot_attention.",
        "tower.grouping.attention.",
        {
            "initial_slots": "initial_slots",
            "norm_input": "norm_input",
            "norm_slots": "rounds.0.norm_slots",
            "to_q": "rounds.0.to_q",
            "to_k": "rounds.0.to_k",
            "to_v": "rounds.0.to_v",
            "gru": "rounds.0.gru",
            "norm_pre_mlp": "rounds.0.norm_mlp",
            "mlp.0": "rounds.0.mlp.0",
            "mlp.2": "rounds.0.mlp.2",
        },
    ),
    (
        "decoder.allocation_transformer.",
        "decoder.",
        {
            "input_mlp.0": "query.0",
            "input_mlp.2": "query.2",
            "transformer.layers.{i}.0.norm": "blocks.{i}.norm_attention",
            "transformer.layers.{i}.0.fn.to_q": "blocks.{i}.to_q",
            "transformer.layers.{i}.0.fn.to_kv": "blocks.{i}.to_k + to_v",
            "transformer.layers.{i}.0.fn.to_out.0": "blocks.{i}.out",
            "transformer.layers.{i}.1.norm": "blocks.{i}.norm_mlp",
            "transformer.layers.{i}.1.fn.net.0": "blocks.{i}.mlp.0",
            "transformer.layers.{i}.1.fn.net.3": "blocks.{i}.mlp.2",
        },
    ),
    (
        "decoder.",
        "decoder.",
        {
            "mixing_block.to_q": "to_q",
            "mixing_block.to_k": "to_k",
            "render_mlp.0": "input_proj",
            "render_mlp.{2i}": "render_mlp.{2i-1}",
            "render_mlp.8": "colour",
        },
    ),
)
