"""Run EfficientNet-Lite by ONNX Runtime: the same features in a quarter of the time on a processor."""

from __future__ import annotations

from typing import Any

import numpy as np

_OPSET, _IR = 17, 8  # of 2022: any onnxruntime of the extra reads them


def onnx_session(network: Any) -> Any:
    """Export the feature extractor to a session of ONNX Runtime; None without the packages.

    `torch.onnx.export` makes the same graph, and takes seconds each time.
    """
    try:
        import onnx  # noqa: F401 - for `_export`
        import onnxruntime
    except ImportError:  # missing, or not for this machine
        return None
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # threads that decode need the cores
    return onnxruntime.InferenceSession(_export(network), options, providers=["CPUExecutionProvider"])


def _export(network: Any) -> bytes:
    """The layers of `extract_features` as an ONNX model."""
    import onnx
    from onnx import helper, numpy_helper

    nodes: list[Any] = []
    weights = {"zero": np.array(0, "f4"), "six": np.array(6, "f4")}

    def add(kind: str, *inputs: str, **settings: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"v{len(nodes)}"], **settings))
        return f"v{len(nodes) - 1}"

    def convolve(value: str, convolution: Any, norm: Any, *, clipped: bool = True) -> str:
        """Add a convolution with its batch normalisation folded in, and ReLU6."""
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        weight, bias = f"w{len(nodes)}", f"w{len(nodes)}b"
        weights[weight] = (convolution.weight * scale[:, None, None, None]).detach().contiguous().numpy()
        weights[bias] = (norm.bias - norm.running_mean * scale).detach().numpy()
        left, right, top, bottom = getattr(convolution.static_padding, "padding", (0, 0, 0, 0))
        pads, strides, group = [top, left, bottom, right], list(convolution.stride), convolution.groups
        found = add("Conv", value, weight, bias, pads=pads, strides=strides, group=group)
        return add("Clip", found, "zero", "six") if clipped else found

    value = convolve("pixels", network._conv_stem, network._bn0)
    for block in network._blocks:
        before, settings = value, block._block_args
        if settings.expand_ratio != 1:
            value = convolve(value, block._expand_conv, block._bn0)
        value = convolve(value, block._depthwise_conv, block._bn1)
        value = convolve(value, block._project_conv, block._bn2, clipped=False)
        if block.id_skip and settings.stride == 1 and settings.input_filters == settings.output_filters:
            value = add("Add", before, value)
    value = convolve(value, network._conv_head, network._bn1)
    graph = helper.make_graph(
        nodes,
        "efficientnet-lite",
        [helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
    content: bytes = model.SerializeToString()
    return content
