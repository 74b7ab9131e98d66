"""Private attributes of torch's objects that other modules read, and why there is no public way."""

from __future__ import annotations

ATTRIBUTES = {
    # operators
    "_schema": "the signature: arguments, what is written, what aliases what; operators have no public one",
    "_overloadname": "the name of the overload alone; `name()` has it with the operator's",
    "_qualified_op_name": "of all overloads together: the namespace and the name",
    # tensors and storages
    "_cdata": "which storage it is: `untyped_storage()` makes a new object at each call",
    "_coalesced_": "says of a sparse copy what was known of the original",
    "_is_view": "what is saved for a backward must not be a view of a result",
    "_is_zerotensor": "a tensor of zeros without memory, which a copy must not read",
    # entries that AOTAutograd's functions keep in their context, and its mark for arguments passed as one list
    "_boxed_call": "the mark of functions that take their arguments as one list, and may free them",
    "_materialize_non_diff_grads": "as AOTAutograd's own function sets it",
    "_tensors_no_vc_check": "saved without a check of their versions, where AOTAutograd's backward looks for them",
    # process groups
    "_register_backend": "a process group in Python is made of backends; it has no public way to them",
    "_set_default_backend": "likewise",
}
