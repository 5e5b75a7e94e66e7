"""Run EfficientNet-Lite by ONNX Runtime: the same features in a quarter of the time on a processor."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt

_OPSET, _IR = 17, 8  # of 2022: any onnxruntime of the extra reads them


def onnx_session(network: Any) -> Any:
    """Export the feature extractor to a session of ONNX Runtime; None without the packages.

    `torch.onnx.export` makes the same graph, and takes seconds each time.
    """
    if any(importlib.util.find_spec(package) is None for package in ("onnx", "onnxruntime")):
        return None
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # threads that decode need the cores
    graph = _Graph()
    graph.add_network(network)
    return onnxruntime.InferenceSession(graph.serialized(), options, providers=["CPUExecutionProvider"])


class _Graph:
    """Nodes and weights; `value` is the name of the last result."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: dict[str, npt.NDArray[Any]] = {"zero": np.array(0, "f4"), "six": np.array(6, "f4")}
        self.value = "pixels"

    def add_network(self, network: Any) -> None:
        """Add the layers of `extract_features`."""
        self._convolution(network._conv_stem, network._bn0)
        for block in network._blocks:
            before, settings = self.value, block._block_args
            if settings.expand_ratio != 1:
                self._convolution(block._expand_conv, block._bn0)
            self._convolution(block._depthwise_conv, block._bn1)
            self._convolution(block._project_conv, block._bn2, clipped=False)
            if block.id_skip and settings.stride == 1 and settings.input_filters == settings.output_filters:
                self._node("Add", [before, self.value])
        self._convolution(network._conv_head, network._bn1)

    def _convolution(self, convolution: Any, norm: Any, *, clipped: bool = True) -> None:
        """Add a convolution with its batch normalisation folded in, and ReLU6."""
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        name = f"w{len(self.nodes)}"
        self.weights[name] = (convolution.weight * scale[:, None, None, None]).detach().contiguous().numpy()
        self.weights[f"{name}b"] = (norm.bias - norm.running_mean * scale).detach().numpy()
        left, right, top, bottom = getattr(convolution.static_padding, "padding", (0, 0, 0, 0))
        pads, strides, group = [top, left, bottom, right], list(convolution.stride), convolution.groups
        inputs = [self.value, name, f"{name}b"]
        self._node("Conv", inputs, pads=pads, strides=strides, group=group)
        if clipped:
            self._node("Clip", [self.value, "zero", "six"])

    def _node(self, kind: str, inputs: list[str], **settings: Any) -> None:
        import onnx

        self.value = f"v{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(kind, inputs, [self.value], **settings))

    def serialized(self) -> bytes:
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        ends = [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", 3, "h", "w"])]
        found = [helper.make_tensor_value_info(self.value, TensorProto.FLOAT, None)]
        weights = [numpy_helper.from_array(value, name) for name, value in self.weights.items()]
        graph = helper.make_graph(self.nodes, "efficientnet-lite", ends, found, weights)
        model = onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
        content: bytes = model.SerializeToString()
        return content
