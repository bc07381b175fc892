"""Our models inside stock open_clip: `import sparo.openclip`, then `open_clip.create_model_and_transforms("sparo-ViT-B-16", pretrained=PATH)`.

For a program that starts its own process: `python -m sparo.openclip run -- clip_benchmark.cli eval …`
"""

import sys

from sparo_train.openclip import main

if __name__ == "__main__":
    main(sys.argv[1:])
