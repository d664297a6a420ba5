"""The classes of `transformers` that the built-in model consists of, importable on any machine.

Importing them imports torchvision, which fails with a CPU build of torch until `engines.torch_backend`
has declared the missing operators. Import the classes from here.
"""

import engines.torch_backend  # noqa: F401  isort: skip
from transformers import LlavaConfig as LlavaConfig
from transformers import LlavaForConditionalGeneration as LlavaForConditionalGeneration
from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
