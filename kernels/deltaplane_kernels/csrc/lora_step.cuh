// What shrink and expand share: the launch, the step's table and the slot table that they read, loads and products.

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int PAGE_ROWS = 8;        // rank rows of a matrix in a page
constexpr int RANK_BLOCK = 16;      // rank rows of one tensor-core product: two pages
constexpr int SUBTILE = 16;         // rows whose shrunk values lie in shared memory at a time
constexpr int COLUMN_BLOCK = 256;   // columns of y of one block: 64 of each warp
constexpr int MAX_RANK = 256;
constexpr int MAX_ROWS = MAX_RANK + PAGE_ROWS;  // with a gain row, a bias row and the rest of their page
constexpr int MAX_SLICES = 4;

// As in lora_slots.py.
constexpr int HAS_GAIN = 1 << 16;
constexpr int HAS_BIAS = 1 << 17;
constexpr int IS_BLEND = 1 << 18;

// Mirrored by lora_launch.Launch. Pitches and strides are in elements.
struct Launch {
    const void* a;                  // A and B of this layer and linear in page 0
    const void* b;
    const void* x;
    void* y;
    float* partial;                 // [splits, num_rows, num_slices, MAX_RANK], by place in the step's row list
    const int* step;                // see lora_tiles.py
    int* x_is_there;                // where shrink waits for x, and not for the kernel ahead of it; or null
    const int* slots;               // [rows, slots_pitch], see lora_slots.py
    long long page_stride;
    long long x_pitch;
    long long y_pitch;
    int a_pitch;
    int b_pitch;
    int slots_pitch;
    int factors_at;                 // in a row of slots
    int slices_at;                  // this linear's first slice in a row of slots
    int num_rows;
    int in_features;
    int num_slices;
    int splits;                     // of in_features
    int split_width;
    int column_blocks;              // of all slices
    int y_column[MAX_SLICES];
    int b_column[MAX_SLICES];
    int width[MAX_SLICES];
};

struct Tile {
    int slot;
    int first;                      // its first row's place in the row list
    int count;
    int rows_at;                    // in the step's table: the numbers of its rows in x and y
};

__device__ int num_tiles(const Launch& launch) { return launch.step[0]; }

__device__ int num_step_rows(const Launch& launch) { return launch.step[2]; }

__device__ Tile tile_at(const Launch& launch, int index) {
    const int rows = ceil_div(num_step_rows(launch), 2);  // two entries of rows are as long as a tile's
    const int4 entry = reinterpret_cast<const int4*>(launch.step)[1 + rows + index];
    return {entry.x, entry.y, entry.z, launch.step[1] + entry.y};
}

// The row of that number as a tile of its own, whatever else has its slot. Loaded where it is written, early.
__device__ Tile tile_of_row(const Launch& launch, int number) {
    int slot, place;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(slot), "=r"(place) : "l"(launch.step + 4 + 2 * number));
    return {slot, place, 1, launch.step[1] + place};
}

// The number in x and y of a tile's row.
__device__ int row_number(const Launch& launch, const Tile& tile, int place) {
    return launch.step[tile.rows_at + place];
}

// What a slot has of a slice: rank rows, then a gain row and a bias row in B.
struct Rows {
    int entry;                      // as in the slot table

    __device__ int rank() const { return entry & 0xffff; }
    __device__ bool has_gain() const { return entry & HAS_GAIN; }
    __device__ bool has_bias() const { return entry & HAS_BIAS; }
    __device__ bool is_blend() const { return entry & IS_BLEND; }  // of factors for its pages
    __device__ int count() const { return rank() + has_gain() + has_bias(); }
};

__device__ Rows rows_of(const Launch& launch, int slot, int slice) {
    return {launch.slots[static_cast<long long>(slot) * launch.slots_pitch + launch.slices_at + slice]};
}

__device__ const int* pages_of(const Launch& launch, int slot) {
    return launch.slots + static_cast<long long>(slot) * launch.slots_pitch;
}

__device__ float factor_of(const Launch& launch, const int* pages, int row) {
    return __int_as_float(pages[launch.factors_at + row / PAGE_ROWS]);
}

__device__ float* partial_at(const Launch& launch, int split, int place, int slice) {
    const long long row = static_cast<long long>(split) * launch.num_rows + place;
    return launch.partial + (row * launch.num_slices + slice) * MAX_RANK;
}

// Weights never change under a kernel. Volatile all the same: loads are issued where they are written, early.
__device__ uint4 load_weights(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

// Activations do, until the kernel before this one is done: not to be moved above the wait.
__device__ uint4 load_activations(const void* address) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
}

__device__ float load_partial(const float* address) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
    return v;
}

__device__ void mma_tf32(float (&d)[4], float2 low, float2 high, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(low.x)), "r"(__float_as_uint(low.y)), "r"(__float_as_uint(high.x)),
          "r"(__float_as_uint(high.y)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// The part of a float that TF32 keeps.
__device__ float tf32_part(float v) { return __uint_as_float(__float_as_uint(v) & 0xffffe000u); }

// Of two pairs, element by element.
template <typename Type>
__device__ float2 product(uint one, uint other) {
    const float2 a = Type::unpack(one), b = Type::unpack(other);
    return {a.x * b.x, a.y * b.y};
}
