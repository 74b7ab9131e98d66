"""Recurrent cells, as the fused operators that torch expects from a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flambeau.ops.facts import describe

aten = torch.ops.aten


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(input_gates: Tensor, hidden_gates: Tensor, c: Tensor, input_bias: Tensor | None = None,
              hidden_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """c' = f c + i g;  h' = o tanh(c'). The third result holds the gates, for the backward."""
    i, f, g, o = (_biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * c + i * g
    return o * after.tanh(), after, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(grad_h: Tensor | None, grad_c: Tensor | None, c: Tensor, after: Tensor, gates: Tensor,
                       has_bias: bool) -> Any:
    if grad_h is None and grad_c is None:
        return None, None, None
    i, f, g, o = gates.chunk(4, 1)
    t = after.tanh()
    h = torch.zeros_like(after) if grad_h is None else grad_h
    through = h * o * (1 - t * t)
    if grad_c is not None:
        through = through + grad_c
    grads = torch.cat((through * g * i * (1 - i), through * c * f * (1 - f), through * i * (1 - g * g),
                       h * t * o * (1 - o)), 1)
    return grads, through * f, grads.sum(0) if has_bias else None


def gru_cell(input_gates: Tensor, hidden_gates: Tensor, h: Tensor, input_bias: Tensor | None = None,
             hidden_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h' = n + z (h - n),  n = tanh(in + r hn). The second result holds r, z, n, h and hn, for the backward."""
    ir, iz, i_n = _biased(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * hn).tanh()
    return n + z * (h - n), torch.cat((r, z, n, h, hn), 1)


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    r, z, n, h, hn = workspace.chunk(5, 1)
    at_n = grad * (1 - z) * (1 - n * n)
    at_r, at_z = at_n * hn * r * (1 - r), grad * (h - n) * z * (1 - z)
    of_input, of_hidden = torch.cat((at_r, at_z, at_n), 1), torch.cat((at_r, at_z, at_n * r), 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad * z, *biases


describe(aten._thnn_fused_lstm_cell.default, instead=lstm_cell)
describe(aten._thnn_fused_lstm_cell_backward_impl.default, instead=lstm_cell_backward)
describe(aten._thnn_fused_gru_cell.default, instead=gru_cell)
describe(aten._thnn_fused_gru_cell_backward.default, instead=gru_cell_backward)
