"""Registries of built-in components. Entries are import paths and load on first use."""

from __future__ import annotations

from .registry import Registry

# Training methods: config, objective, examples, rules across blocks, layouts of exports (objectives/method.py).
METHODS = Registry(
    "sparo.methods",
    {
        "clip": "sparo_train.objectives.clip:METHOD",
        "dino": "sparo_train.objectives.dino:METHOD",
        "distill": "sparo_train.objectives.distill:METHOD",
        "slots": "object_centric.objectives.slot_autoencoder:METHOD",
        "set_prediction": "object_centric.objectives.set_prediction:METHOD",
        "slate": "object_centric.objectives.slate:METHOD",
        "video_slots": "object_centric.video.video_autoencoder:METHOD",
        "video_slate": "object_centric.video.video_slate:METHOD",
        "slot_contrast": "object_centric.video.video_autoencoder:SLOT_CONTRAST",
        "novel_views": "object_centric.scenes3d.novel_views:METHOD",
    },
    ("config", "objective", "examples", "rules", "exports"),
)

# A readout is a module of its tower, under its own name. These names are taken by modules of towers, ours and timm's.
_TOWER_PARTS = (
    "transformer trunk conv1 patch_embed patch_dropout pos_drop patch_drop norm_pre ln_pre ln_post ln_final norm fc_norm head head_drop "
    "blocks class_embedding cls_token reg_token positional_embedding pos_embed token_embedding attn_mask attn_pool proj text_projection"
)

# Losses of CLIP between images and texts: a config that computes the loss (objectives/contrastive.py: ContrastiveLoss).
LOSSES = Registry(
    "sparo.losses",
    {
        "softmax": "sparo_train.objectives.contrastive:SoftmaxLoss",
        "sigmoid": "sparo_train.objectives.contrastive:SigmoidLoss",
    },
    ("mean_loss",),
)

# Readouts, which turn tokens into slots: a config that builds the readouts of both towers (models/readout.py).
READOUTS = Registry(
    "sparo.readouts",
    {
        "token": "sparo_train.models.readouts.pooling:TokenReadOut",
        "cls": "sparo_train.models.readouts.pooling:ClsReadOut",
        "gap": "sparo_train.models.readouts.pooling:GapReadOut",
        "sparo": "sparo_train.models.sparo:SparoReadOut",
        "attpool": "sparo_train.models.readouts.attpool:AttPoolReadOut",
        "coca": "sparo_train.models.readouts.coca:CocaReadOut",
        "map": "sparo_train.models.readouts.siglip_map:MapReadOut",
        "ep": "sparo_train.models.readouts.efficient_probing:EfficientReadOut",
        "linear_bottleneck": "sparo_train.models.readouts.linear_bottleneck:LinearBottleneckReadOut",
        "fdt": "sparo_train.models.readouts.fdt:FdtReadOut",
        "flair": "sparo_train.models.readouts.flair:FlairReadOut",
        "slot_attention": "object_centric.grouping.slot_readout:SlotAttentionReadOut",
    },
    ("placement", "shape", "build", "infer"),
    _TOWER_PARTS.split(),
)

# Frozen teachers of distillation: a config that builds the teacher (objectives/distill_examples.py: Teacher).
TEACHERS = Registry(
    "sparo.teachers",
    {"checkpoint": "evals.encoders.teacher:CheckpointTeacherConfig"},
    ("build", "facts"),
)

# Image encoders of slot models: a config that builds the encoder (object_centric/encoders/).
SLOT_ENCODERS = Registry(
    "sparo.slot_encoders",
    {
        "conv": "object_centric.encoders.convnet:ConvNetConfig",
        "resnet34": "object_centric.encoders.convnet:ResNet34Config",
        "frozen": "object_centric.encoders.frozen:FrozenConfig",
        "tokens": "object_centric.encoders.tokens:TokensConfig",
        "vit": "object_centric.encoders.vit_features:VitFeaturesConfig",
    },
    ("build", "side", "cost"),
)

# Ray decoders, which render scenes from slots: a config that builds the decoder
# (object_centric/scenes3d/ray_decoder.py: RayDecoder).
RAY_DECODERS = Registry(
    "sparo.ray_decoders",
    {
        "nerf": "object_centric.scenes3d.nerf:NerfConfig",
        "slot_mixer": "object_centric.scenes3d.slot_mixer:SlotMixerConfig",
        "broadcast": "object_centric.scenes3d.ray_decoder:RayBroadcastConfig",
    },
    ("build",),
)

# Engines, which run an objective on devices: config, engine, and its costs (engine/engine_kind.py: EngineKind).
ENGINES = Registry(
    "sparo.engines",
    {
        "local": "sparo_train.engine.local:ENGINE",
        "ddp": "sparo_train.engine.ddp:ENGINE",
        "fsdp2": "sparo_train.engine.fsdp2:ENGINE",
        "deepspeed": "sparo_train.engine.deepspeed:ENGINE",
    },
    ("config", "build", "costs", "one_process"),
)

# Optimizers: a config that builds the optimizer (engine/optim.py: OptimConfig).
OPTIMIZERS = Registry(
    "sparo.optimizers",
    {
        "adamw": "sparo_train.engine.optim:AdamWConfig",
        "muon": "sparo_train.engine.muon:MuonConfig",
    },
    ("build", "state_names"),
)

# Data sources: config, and a function that opens the source (data/sources/base.py).
SOURCES = Registry(
    "sparo.sources",
    {
        "shards": "sparo_train.data.sources.shards:SOURCE",
        "folder": "sparo_train.data.sources.folder:SOURCE",
        "parquet": "sparo_train.data.rows.parquet:SOURCE",
        "datasets": "sparo_train.data.rows.hf_datasets:SOURCE",
        "mds": "sparo_train.data.rows.mds:SOURCE",
        "litdata": "sparo_train.data.rows.litdata:SOURCE",
        "energon": "sparo_train.data.sources.energon:SOURCE",
        "table": "sparo_train.data.rows.table:SOURCE",
    },
    ("config", "open"),
)

# Encoders of trained objectives, by the method's name (evals/encoders/).
ENCODERS = Registry(
    "sparo.encoders",
    {
        "clip": "evals.encoders.clip_encoder:clip_encoder",
        "dino": "evals.encoders.dino_encoder:dino_encoder",
        "distill": "evals.encoders.dino_encoder:student_encoder",
        "slots": "object_centric.tasks.slot_encoder:slot_encoder",
        "set_prediction": "object_centric.tasks.slot_encoder:set_encoder",
        "slate": "object_centric.tasks.slot_encoder:slate_encoder",
        "video_slots": "object_centric.tasks.video_encoder:video_encoder",
        "video_slate": "object_centric.tasks.video_encoder:video_slate_encoder",
        "slot_contrast": "object_centric.tasks.video_encoder:video_encoder",
        "novel_views": "object_centric.tasks.scene_encoder:scene_encoder",
    },
)

# Foreign weight files, by the prefix before the colon, as in timm:NAME@FILE: a function of the rest.
CHECKPOINTS = Registry(
    "sparo.checkpoints",
    {
        "pixels": "evals.encoders.baselines:parse_pixels",
        "voronoi": "evals.encoders.baselines:parse_voronoi",
        "open_clip": "evals.encoders.foreign:from_open_clip",
        "timm": "evals.encoders.foreign:from_timm",
        "hf": "evals.encoders.huggingface:from_huggingface",
        "onnx": "evals.encoders.onnx_encoder:from_onnx",
        "videosaur": "object_centric.released.videosaur:from_videosaur",
        "spot": "object_centric.released.spot:from_spot",
        "slate": "object_centric.released.slate_file:from_slate",
        "mesh": "object_centric.released.mesh:from_mesh",
        "vqvfm": "object_centric.released.vqvfm:from_vqvfm",
    },
)

# Evaluation tasks: config, requirements on the encoder, and the run (evals/suite/task.py).
TASKS = Registry(
    "sparo.tasks",
    {
        "zeroshot": "evals.suite.zeroshot_tasks:ZEROSHOT",
        "attributes": "evals.suite.zeroshot_tasks:ATTRIBUTES",
        "retrieval": "evals.suite.image_text_tasks:RETRIEVAL",
        "conditioned_retrieval": "evals.suite.image_text_tasks:CONDITIONED_RETRIEVAL",
        "pairs": "evals.suite.image_text_tasks:PAIRS",
        "choice": "evals.suite.question_tasks:CHOICE",
        "matching": "evals.suite.question_tasks:MATCHING",
        "paraphrases": "evals.suite.question_tasks:PARAPHRASES",
        "associations": "evals.suite.associations:ASSOCIATIONS",
        "probe": "evals.suite.labelled_tasks:PROBE",
        "knn": "evals.suite.labelled_tasks:KNN",
        "rank": "evals.suite.rank_task:RANK",
        "linear": "evals.suite.linear_probe:LINEAR",
        "attentive_probe": "evals.suite.attentive_probe:ATTENTIVE",
        "regression": "evals.suite.regression_task:REGRESSION",
        "linear_segmentation": "evals.suite.patch_segmentation:SEGMENTATION",
        "knn_segmentation": "evals.suite.patch_segmentation:KNN_SEGMENTATION",
        "zeroshot_segmentation": "evals.suite.zeroshot_segmentation:ZEROSHOT_SEGMENTATION",
        "validation_loss": "evals.suite.loss_task:VALIDATION_LOSS",
        "masks": "object_centric.tasks.mask_task:MASKS",
        "objects": "object_centric.tasks.mask_task:OBJECTS",
        "reconstruction": "object_centric.tasks.mask_task:RECONSTRUCTION",
        "video_masks": "object_centric.tasks.video_task:VIDEO_MASKS",
        "slot_probe": "object_centric.tasks.probe_task:SLOT_PROBE",
        "view_masks": "object_centric.tasks.view_task:VIEW_MASKS",
        "scene_probe": "object_centric.tasks.probe_task:SCENE_PROBE",
    },
    ("config", "needs", "check", "run"),
)

# Layouts of evaluation data on disk: their fields, and a function that opens them (evals/sets/base.py: Layout).
LAYOUTS = Registry(
    "sparo.layouts",
    {
        "wds": "evals.sets.wds:LAYOUT",
        "folder": "evals.sets.image_files:FOLDER",
        "imagenet": "evals.sets.image_files:IMAGENET",
        "imagenetv2": "evals.sets.image_files:IMAGENETV2",
        "objectnet": "evals.sets.image_files:OBJECTNET",
        "karpathy": "evals.sets.captions:KARPATHY",
        "captions": "evals.sets.caption_files:CAPTIONS",
        "sugar_crepe": "evals.sets.captions:SUGAR_CREPE",
        "table": "evals.sets.table_set:TABLE",
        "torchvision": "evals.sets.library:LAYOUT",
        "valse": "evals.sets.question_files:VALSE_LAYOUT",
        "whatsup": "evals.sets.question_files:WHATSUP_LAYOUT",
        "svo": "evals.sets.question_files:SVO_LAYOUT",
        "segmentation": "evals.sets.segmentation_files:LAYOUT",
        "winogavil": "evals.sets.question_files:WINOGAVIL_LAYOUT",
    },
    ("kinds", "open"),
)

# Exports for other programs: a function that writes the layout (evals/interop/exporting.py). A method names the layouts
# of its runs.
EXPORTS = Registry(
    "sparo.exports",
    {
        "open_clip": "evals.interop.exporting:OPEN_CLIP",
        "sparo-clip": "evals.interop.exporting:SPARO_CLIP",
        "dino": "evals.interop.exporting:DINO",
        "timm": "evals.interop.backbone_exports:TIMM",
        "transformers": "evals.interop.transformers_export:TRANSFORMERS",
        "torch": "evals.interop.backbone_exports:TORCH",
        "onnx": "evals.interop.onnx_export:ONNX",
    },
    ("write", "use"),
)
