"""From image features to the decoder's embedding space. Knows nothing of either side but their widths."""

from torch import Tensor, nn

from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.models.config import VLMConfig


class Projector(nn.Module):
    """LLaVA-1.5's projector: two linear maps with an activation between. Source: Liu et al. 2023, section 3.2."""

    def __init__(self, config: VLMConfig) -> None:
        super().__init__()
        width = config.vision.hidden_size * len(config.vision_feature_layers)
        self.linear_1 = nn.Linear(width, config.text.hidden_size, bias=config.projector_bias)
        self.linear_2 = nn.Linear(
            config.text.hidden_size, config.text.hidden_size, bias=config.projector_bias
        )
        self.activation = ACTIVATIONS[config.projector_hidden_act]

    def forward(self, features: Tensor) -> Tensor:
        """Shapes: (B, P, layers * vision width); returns (B, P, decoder width)."""
        return self.linear_2(self.activation(self.linear_1(features)))
