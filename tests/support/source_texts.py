"""The texts that source code puts together."""

import ast


def text_in(node: ast.AST, *, computed: str) -> str:
    """The text of an expression of texts, with `computed` for each part that is computed."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_in(part, computed=computed) for part in parts)
        case ast.BinOp(left=left, right=right):
            return text_in(left, computed=computed) + text_in(right, computed=computed)
    return computed
