// Tensor-core products of a warpgroup on operands in shared memory (wgmma). For compute capability 9.0.

// Rows of BOX columns each, as copy_matrix() leaves them: 128 bytes a row, swizzled in groups of 8 rows.
struct Operand {
    unsigned long long descriptor;

    // From 16 more columns on, `count` times.
    __device__ Operand columns(int count) const { return {descriptor + count * 2}; }
};

__device__ Operand operand(const ushort* rows) {
    constexpr unsigned long long GROUP_BYTES = 1024, SWIZZLE_128_BYTES = 1;
    return {shared_address(rows) >> 4 | GROUP_BYTES >> 4 << 32 | SWIZZLE_128_BYTES << 62};
}

// Registers and shared memory are ready for products.
__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Until all products that were begun have ended.
__device__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// d += [64 rows, 16 columns] x [outputs, 16 columns]^T, twice as many outputs as `d` has elements. A thread holds, of
// each 8 outputs, 4 elements: {row g, output 2t}, {g, 2t + 1}, {g + 8, 2t}, {g + 8, 2t + 1} of its warp's 16 rows.
template <typename Type, int SUMS>
__device__ void multiply(float (&d)[SUMS], Operand rows, Operand outputs);

#define SUMS_8(I)                                                                                                 \
    "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), "+f"(d[I + 6]),   \
        "+f"(d[I + 7])

// REGISTERS: places of the sums among the operands; DESCRIPTORS: of the two after them. The rest are the sums.
#define MULTIPLY(TYPE, NAME, SUMS, OUTPUTS, REGISTERS, DESCRIPTORS, ...)                                          \
    template <>                                                                                                   \
    __device__ void multiply<TYPE>(float (&d)[SUMS], Operand rows, Operand outputs) {                             \
        asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" OUTPUTS "k16.f32." NAME "." NAME " "                     \
                     "{" REGISTERS "}, " DESCRIPTORS ", add, 1, 1, 0, 0;}"                                        \
                     : __VA_ARGS__                                                                                \
                     : "l"(rows.descriptor), "l"(outputs.descriptor)                                              \
                     : "memory");                                                                                 \
    }

#define MULTIPLY_BOTH(...)                                                                                        \
    MULTIPLY(BFloat16, "bf16", __VA_ARGS__)                                                                       \
    MULTIPLY(Float16, "f16", __VA_ARGS__)

#define REGISTERS_24                                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_28 REGISTERS_24 ", %24, %25, %26, %27"
#define REGISTERS_32 REGISTERS_28 ", %28, %29, %30, %31"
#define REGISTERS_56                                                                                              \
    REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "   \
                 "%50, %51, %52, %53, %54, %55"

MULTIPLY_BOTH(24, "48", REGISTERS_24, "%24, %25", SUMS_8(0), SUMS_8(8), SUMS_8(16))
MULTIPLY_BOTH(28, "56", REGISTERS_28, "%28, %29", SUMS_8(0), SUMS_8(8), SUMS_8(16), "+f"(d[24]), "+f"(d[25]),
              "+f"(d[26]), "+f"(d[27]))
MULTIPLY_BOTH(32, "64", REGISTERS_32, "%32, %33", SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24))
MULTIPLY_BOTH(56, "112", REGISTERS_56, "%56, %57", SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24), SUMS_8(32),
              SUMS_8(40), SUMS_8(48))
