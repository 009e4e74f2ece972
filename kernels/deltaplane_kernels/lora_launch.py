"""What the kernels of csrc/lora.cu are told in a launch, and which linears they take."""

import ctypes

from deltaplane_kernels.rank_pages import ALIGNMENT, PackedLinearPlacement, RankPageLayout

# As in lora_step.cuh.
THREADS = 128
COLUMN_BLOCK = 256
MAX_SLICES = 4


class Launch(ctypes.Structure):
    """What a launch is given, by value: struct Launch of lora_step.cuh, which explains the fields."""

    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("x_is_there", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("page_stride", ctypes.c_longlong),
        ("x_pitch", ctypes.c_longlong),
        ("y_pitch", ctypes.c_longlong),
        ("a_pitch", ctypes.c_int),
        ("b_pitch", ctypes.c_int),
        ("slots_pitch", ctypes.c_int),
        ("factors_at", ctypes.c_int),
        ("slices_at", ctypes.c_int),
        ("num_rows", ctypes.c_int),
        ("in_features", ctypes.c_int),
        ("num_slices", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("split_width", ctypes.c_int),
        ("column_blocks", ctypes.c_int),
        ("y_column", ctypes.c_int * MAX_SLICES),
        ("b_column", ctypes.c_int * MAX_SLICES),
        ("width", ctypes.c_int * MAX_SLICES),
    ]


class NormLaunch(ctypes.Structure):
    """What a launch that ends in a norm is given: struct NormLaunch of expand_norm.cuh."""

    _fields_ = [
        ("op", Launch),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("weight_slots", ctypes.c_void_p),
        ("weight_offsets", ctypes.c_void_p),
        ("weight_pool", ctypes.c_void_p),
        ("weight_offset_stride", ctypes.c_longlong),
        ("cluster", ctypes.c_int),
        ("block_columns", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


def check_layout(layout: RankPageLayout) -> None:
    """Errors: ValueError where a linear has too many slices, or a width that 16-byte loads do not divide."""
    for place in layout.placements.values():
        linear = place.linear
        if len(linear.slices) > MAX_SLICES:
            raise ValueError(f"{linear.name} has {len(linear.slices)} slices; at most {MAX_SLICES} on a GPU")
        for width in (linear.in_features, *(part.out_features for part in linear.slices)):
            if width % ALIGNMENT:
                raise ValueError(
                    f"{linear.name} has a width of {width}; adapters on a GPU need multiples of {ALIGNMENT}"
                )


def column_blocks(place: PackedLinearPlacement) -> int:
    """Blocks of columns over all slices; none reaches over two."""
    return sum(-(-part.out_features // COLUMN_BLOCK) for part in place.linear.slices)


def widths_of_one_slice(layout: RankPageLayout) -> dict[str, int]:
    """Outputs of each linear that has one slice."""
    linears = (place.linear for place in layout.placements.values())
    return {one.name: one.slices[0].out_features for one in linears if len(one.slices) == 1}
