"""Tables over several suites: compositional sets, and the columns that reviewers of papers on compositionality ask for."""

from __future__ import annotations

from .grid import Column

_VTAB = (
    "caltech101 cifar100 clevr_count_all clevr_closest_object_distance diabetic_retinopathy dmlab dsprites_label_orientation "
    "dsprites_label_x_position dtd eurosat flowers kitti_closest_vehicle_distance pcam pets resisc45 smallnorb_label_azimuth "
    "smallnorb_label_elevation svhn"
)
VTAB = (*(f"vtab/{name}" for name in _VTAB.split()), "sun397")
_SUGAR_CREPE = [Column("SugarCrepe", "", "sugar_crepe", "macro")]
_PLUS = [Column("SugarCrepe++", label, "sugar_crepe_pp", metric) for label, metric in (("ITT", "itt"), ("TOT", "tot"))]
_ARO = [Column("ARO", "VG-R", "aro/vg_relation", "acc"), Column("ARO", "VG-A", "aro/vg_attribution", "acc")]
_ORDER = [
    Column("ARO", "COCO order", "aro/coco_order", "acc"),
    Column("ARO", "Flickr order", "aro/flickr30k_order", "acc"),
]
_WINOGROUND = [Column("Winoground", name, "winoground", name) for name in ("text", "image", "group")]
_MATCH = [Column("Winoground", "group match", "winoground", "group_match")]
_MATCHING = [
    Column("ColorSwap", "group", "colorswap", "group"),
    Column("BiVLC", "group", "bivlc", "group"),
    Column("EqBen", "group", "eqben", "group"),
    Column("MMVP-VLM", "image", "mmvp_vlm", "image"),
    Column("COLA", "image", "cola", "image"),
]
_NEGATION = [
    Column("NegBench", "COCO", "negbench/coco_mcq", "acc"),
    Column("NegBench", "VOC", "negbench/voc2007_mcq", "acc"),
]
_OTHERS = [
    Column("VALSE", "", "valse", "acc"),
    Column("SVO", "", "svo_probes", "acc"),
    Column("What'sUp", "A", "whatsup/a", "acc"),
    Column("What'sUp", "B", "whatsup/b", "acc"),
    Column("CREPE", "productivity", "crepe/productivity", "acc"),
]
_RETRIEVAL = [
    Column(group, label, task, metric)
    for group, task in (("COCO", "mscoco_captions"), ("Flickr30k", "flickr30k"))
    for label, metric in (("I2T R@1", "text_R@1"), ("T2I R@1", "image_R@1"))
]
SUITE_LAYOUTS = {
    "compositional": [*_SUGAR_CREPE, *_PLUS, *_ARO, *_ORDER, *_WINOGROUND, *_MATCH, *_MATCHING, *_NEGATION, *_OTHERS],
    "reviewer": [
        Column("ImageNet", "zero-shot", "imagenet1k", "acc1"),
        Column("VTAB", f"mean of {len(VTAB)}", "vtab", "acc1", VTAB),
        *_RETRIEVAL,
        *_ARO,
        *_SUGAR_CREPE,
        *_PLUS,
        *_WINOGROUND,
    ],
}
SUITE_TITLES = {
    "compositional": "Compositional sets, authors' scores",
    "reviewer": "Recognition, retrieval and compositionality",
}
