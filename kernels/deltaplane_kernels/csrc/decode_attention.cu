// Attention of decodes, one token each, over their KV pages. Shapes and costs are in attention_cuda.py. For compute
// capability 9 and above.
//
// All there is to it is to read keys and values once, at the speed of the memory, and to start early:
//
// * A tile is 16 keys and their values. The warps of a block take turns at the tiles of its item, a part of one
//   sequence's keys for one KV head. Each asks for STAGES tiles ahead, by tensor copies into a ring of its own in
//   shared memory, and keeps a softmax of its own (online, FlashAttention, Dao et al., 2022).
// * The query heads of a KV head are rows of one tensor-core product, so that keys and values are read once for all.
// * The keys of a long sequence are shared out among blocks (Flash-Decoding, Dao et al., 2023); the last one that is
//   done combines what all have found, in the order of the splits, so that equal steps give equal bits.
// * The first tiles are asked for before the kernel ahead has ended (programmatic dependent launch), all but the one
//   that the kernel ahead writes the step's own token into: the memory works while queries and keys are turned.
//
// Scores are [8 heads, 16 columns of q] x [16 columns, 8 keys]; sums are [16 columns of v, 16 keys] x [16 keys,
// 8 heads], so that the weights that a thread has of scores are those that it needs for sums.

#include "elements.cuh"
#include "barriers.cuh"
#include "bulk_copies.cuh"

constexpr int KEYS = 16;              // of a tile
constexpr int MAX_GROUP = 8;          // query heads of a KV head, at most
constexpr int STAGES = 3;
constexpr int MAX_WARPS = 8;
constexpr float NO_PEAK = -1e30f;     // lower than any score
constexpr uint ALL_LANES = ~0u;

// Mirrored by attention_cuda.DecodeLaunch. The index is described in attention_index.py.
struct Launch {
    TensorMap kv;                     // a layer from its first page on, as rows of DIM columns, KEYS rows
    void* out;                        // [rows, num_kv_heads * group, DIM]
    const void* q;                    // [rows, num_kv_heads * group, DIM], rows of q_pitch elements
    const int* counts;
    const int* rows;
    const int* starts;
    const int* table_starts;
    const int* tables;
    float* sums;                      // [decodes, num_kv_heads, splits, group, DIM]
    float2* weights;                  // of each of these: the peak, and the total relative to it
    int* counters;                    // [decodes, num_kv_heads]: splits that are done
    long long q_pitch;
    int page_rows;                    // from one page to the next, in rows of kv
    int num_kv_heads;
    int group;
    int page_size;                    // a multiple of KEYS
    int window;                       // 0: none
    int most_splits;                  // of a decode
    int least_keys;                   // of a split, a multiple of KEYS
    int spares_even_ones;             // whether sequences of about the mean length are left whole
    float scale;                      // of scores, in powers of two
};

__device__ float exp2_of(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}

// Not to be moved above the wait for the kernel that writes it.
__device__ uint load_pair(const ushort* address) {
    uint pair;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(pair) : "l"(address) : "memory");
    return pair;
}

// What other blocks have written.
__device__ float4 load_from_l2(const float* address) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(address) : "memory");
    return v;
}

__device__ float2 load_from_l2(const float2* address) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address) : "memory");
    return v;
}

// What a block has stored before is seen by the one that counts last.
__device__ int count_one(int* counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Four matrices of 8 x 8 elements; a lane names one row of one of them.
__device__ void load_matrices(uint (&matrices)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared_address(row)) : "memory");
}

__device__ void load_transposed_matrices(uint (&matrices)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(shared_address(row)) : "memory");
}

__device__ int num_warps() { return blockDim.x / 32; }
__device__ int warp_of_thread() { return threadIdx.x / 32; }
__device__ int lane_of_thread() { return threadIdx.x % 32; }

// ---------------------------------------------------------------------------------------------------------
// Items: a split of the keys of one KV head of one decode. First splits go first.

struct Item {
    int sequence;
    int kv_head;
    int split;
    int active;                       // splits that the decode has
    int row;                          // of q and out
    int position;
    int begin, end;                   // keys
    int table;                        // where its block table starts
};

// What decodes and splits a step has.
struct Plan {
    int num_decodes;
    int num_splits;                   // of a decode, at most
    int least_keys;                   // of a split

    __device__ Plan(const Launch& launch) {
        num_decodes = launch.counts[0];
        num_splits = min(launch.counts[1], launch.most_splits);
        const int mean = launch.counts[4], above_mean = ceil_div(mean + mean / 4, KEYS) * KEYS;
        least_keys = launch.spares_even_ones ? max(launch.least_keys, above_mean) : launch.least_keys;
    }

    __device__ int num_items(const Launch& launch) const { return num_decodes * launch.num_kv_heads * num_splits; }

    // Of items without work, `active` is no more than `split`.
    __device__ Item item(const Launch& launch, int index) const {
        Item item;
        item.kv_head = index % launch.num_kv_heads;
        const int rest = index / launch.num_kv_heads;
        item.sequence = rest % num_decodes;
        item.split = rest / num_decodes;
        item.position = launch.starts[item.sequence];
        item.row = launch.rows[item.sequence];
        item.table = launch.table_starts[item.sequence];
        const int num_keys = item.position + 1;
        const int first = launch.window > 0 ? max(num_keys - launch.window, 0) / KEYS * KEYS : 0;
        const int even = ceil_div(ceil_div(num_keys - first, num_splits), KEYS) * KEYS;
        const int size = max(even, least_keys);
        item.active = max(ceil_div(num_keys - first, size), 1);
        item.begin = first + item.split * size;
        item.end = min(item.begin + size, num_keys);
        return item;
    }
};

// ---------------------------------------------------------------------------------------------------------
// A warp's tiles of an item, every num_warps-th, and its ring.

template <int DIM>
struct Tile {
    ushort keys[DIM / BOX][KEYS][BOX];
    ushort values[DIM / BOX][KEYS][BOX];

    // The row of a matrix that this lane names: the matrices are keys 0-7, columns of `octet`; the same keys, the next
    // octet; and both of keys 8-15.
    __device__ static const ushort* row(const ushort (&part)[DIM / BOX][KEYS][BOX], int octet) {
        const int lane = lane_of_thread(), key = lane % 8 + lane / 16 * 8, own = octet + lane / 8 % 2;
        return &part[own / 8][key][(own % 8 ^ key % 8) * VECTOR];
    }
};

template <int DIM>
struct WarpRing {
    Tile<DIM>* tiles;                 // [STAGES]
    Barrier* full;                    // [STAGES]: a tile has arrived
    int done = 0;                     // tiles, of all items

    __device__ void make() const {
        if (lane_of_thread() == 0) {
            for (int stage = 0; stage < STAGES; ++stage) make_barrier(&full[stage], 1);
            publish_barriers();
        }
        __syncwarp();
    }
};

template <int DIM>
struct Tiles {
    const Launch& launch;
    const Item& item;
    WarpRing<DIM>& ring;
    int count;
    int asked = 0;
    int pages;                        // this lane's: of the tile of its number among 32

    __device__ Tiles(const Launch& launch, const Item& item, WarpRing<DIM>& ring)
        : launch(launch), item(item), ring(ring) {
        const int all = ceil_div(max(item.end - item.begin, 0), KEYS);
        count = ceil_div(max(all - warp_of_thread(), 0), num_warps());
    }

    __device__ int first_key(int tile) const {
        return item.begin + (tile * num_warps() + warp_of_thread()) * KEYS;
    }

    // Asks for tiles up to `end`, or to the first that has a key from `unwritten` on.
    __device__ void ask(int end, int unwritten) {
        while (asked < min(end, count) && first_key(asked) + KEYS <= unwritten) {
            if (asked % 32 == 0) load_pages();
            const int page = __shfl_sync(ALL_LANES, pages, asked % 32);
            const int place = item.kv_head * launch.page_size + first_key(asked) % launch.page_size;
            const int row = page * launch.page_rows + place;
            const int stage = (ring.done + asked) % STAGES;
            if (lane_of_thread() == 0) {
                Tile<DIM>& tile = ring.tiles[stage];
                arrive_and_expect(&ring.full[stage], sizeof(Tile<DIM>));
                copy_matrix(tile.keys, launch.kv, 0, row, &ring.full[stage]);
                copy_matrix(tile.values, launch.kv, 0, row + launch.num_kv_heads * launch.page_size,
                            &ring.full[stage]);
            }
            ++asked;
        }
    }

    __device__ void load_pages() {
        const int own = asked + lane_of_thread();
        pages = own < count ? launch.tables[item.table + first_key(own) / launch.page_size] : 0;
    }

    __device__ Tile<DIM>& await_tile(int tile) const {
        const int place = ring.done + tile, stage = place % STAGES;
        await(&ring.full[stage], place / STAGES % 2);
        forget_values(ring.tiles[stage], item.end - first_key(tile));
        return ring.tiles[stage];
    }

    // Slots that are not written yet may hold anything, which no weight of zero makes zero.
    __device__ static void forget_values(Tile<DIM>& tile, int there) {
        if (there >= KEYS) return;
        constexpr int VECTORS = BOX / VECTOR;
        for (int index = there * VECTORS + lane_of_thread(); index < KEYS * VECTORS; index += 32) {
#pragma unroll
            for (auto& part : tile.values) {
                *reinterpret_cast<uint4*>(&part[index / VECTORS][index % VECTORS * VECTOR]) = {0, 0, 0, 0};
            }
        }
        __syncwarp();
    }
};

// ---------------------------------------------------------------------------------------------------------
// A warp's running softmax. Thread (g, t), of lane 4 g + t, has the scores of head g with keys 2t, 2t + 1, 2t + 8 and
// 2t + 9, and the sums of heads 2t and 2t + 1 over columns g and g + 8 of each 16.

template <typename Type, int DIM>
struct Softmax {
    uint q[DIM / 16][2];              // of head g: columns 2t, 2t + 1 and 2t + 8, 2t + 9 of each 16
    float sum[DIM / 16][4];           // column g: (head 2t, head 2t + 1), column g + 8: the same
    float peak;                       // of head g
    float total;                      // of head g, over this thread's keys

    __device__ static int g() { return threadIdx.x % 32 / 4; }
    __device__ static int t() { return threadIdx.x % 4; }

    __device__ void begin(const Launch& launch, const Item& item) {
        const ushort* head = static_cast<const ushort*>(launch.q) + item.row * launch.q_pitch
            + (item.kv_head * launch.group + g()) * DIM + 2 * t();
        const bool is_head = g() < launch.group;
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) q[i][half] = is_head ? load_pair(head + 16 * i + 8 * half) : 0;
        }
#pragma unroll
        for (auto& columns : sum) {
#pragma unroll
            for (float& element : columns) element = 0.0f;
        }
        peak = NO_PEAK;
        total = 0.0f;
    }

    __device__ static int key_of(int place) { return 2 * t() + place % 2 + place / 2 * 8; }

    // Of q with this thread's four keys; those below `from` and from `to` on count for nothing.
    __device__ void score(float (&scores)[4], const Tile<DIM>& tile, float scale, int from, int to) const {
        float product[2][4] = {};
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
            uint k[4];
            load_matrices(k, tile.row(tile.keys, 2 * i));
            Type::mma(product[0], q[i][0], 0, q[i][1], 0, k[0], k[1]);
            Type::mma(product[1], q[i][0], 0, q[i][1], 0, k[2], k[3]);
        }
#pragma unroll
        for (int place = 0; place < 4; ++place) {
            const int key = key_of(place);
            const bool counts = from <= key && key < to;
            scores[place] = counts ? product[place / 2][place % 2] * scale : __int_as_float(0xff800000);
        }
    }

    // Turns scores into weights relative to the peak, which they may raise.
    __device__ void weigh(float (&scores)[4]) {
        float high = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
        high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 1));
        high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, 2));
        const float new_peak = fmaxf(peak, high), factor = exp2_of(peak - new_peak);
        peak = new_peak;
        total *= factor;
#pragma unroll
        for (float& score : scores) {
            score = exp2_of(score - new_peak);
            total += score;
        }
        const float factors[2] = {__shfl_sync(ALL_LANES, factor, 8 * t()),
                                  __shfl_sync(ALL_LANES, factor, 8 * t() + 4)};
#pragma unroll
        for (auto& columns : sum) {
#pragma unroll
            for (int element = 0; element < 4; ++element) columns[element] *= factors[element % 2];
        }
    }

    __device__ void add(const float (&weights)[4], const Tile<DIM>& tile) {
        const uint low = Type::pack({weights[0], weights[1]}), high = Type::pack({weights[2], weights[3]});
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
            uint v[4];
            load_transposed_matrices(v, tile.row(tile.values, 2 * i));
            Type::mma(sum[i], v[0], v[1], v[2], v[3], low, high);
        }
    }

    __device__ void run(Tiles<DIM>& tiles) {
        const Launch& launch = tiles.launch;
        const Item& item = tiles.item;
        const int seen_from = launch.window > 0 ? item.position + 1 - launch.window : 0;
        for (int index = 0; index < tiles.count; ++index) {
            const int first = tiles.first_key(index);
            const Tile<DIM>& tile = tiles.await_tile(index);
            float scores[4];
            score(scores, tile, launch.scale, seen_from - first, item.end - first);
            weigh(scores);
            add(scores, tile);
            __syncwarp();             // all lanes have read the tile
            tiles.ask(index + 1 + STAGES, item.position + KEYS);
        }
        tiles.ring.done += tiles.count;
    }
};

// ---------------------------------------------------------------------------------------------------------
// The warps of a block, then the splits of a decode, put together what they have.

// 8 neighbouring columns of a head, weighted relative to some peak.
struct Columns {
    float sum[VECTOR] = {};
    float total = 0.0f;

    __device__ void add(float factor, float other_total, const float4& low, const float4& high) {
        const float other[VECTOR] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] = fmaf(factor, other[i], sum[i]);
        total = fmaf(factor, other_total, total);
    }

    // 0 where there were no keys: in rows of padding.
    template <typename Type>
    __device__ uint4 mean() const {
        const float factor = total == 0.0f ? 0.0f : 1.0f / total;
        uint pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = Type::pack({sum[2 * i] * factor, sum[2 * i + 1] * factor});
        return {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
};

// What a warp has found, in the place of its ring.
template <int DIM>
struct Found {
    float sums[MAX_GROUP][DIM + 4];   // the pad spreads a warp's stores over all banks
    float2 weights[MAX_GROUP];        // the peak, and the total relative to it

    template <typename Type>
    __device__ void store(const Softmax<Type, DIM>& own) {
        const int g = own.g(), t = own.t();
        float sum = own.total + __shfl_xor_sync(ALL_LANES, own.total, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (t == 0) weights[g] = {own.peak, sum};
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
#pragma unroll
            for (int element = 0; element < 4; ++element) {
                sums[2 * t + element % 2][16 * i + g + element / 2 * 8] = own.sum[i][element];
            }
        }
    }
};

template <int DIM>
struct Shared {
    static_assert(sizeof(Found<DIM>) <= STAGES * sizeof(Tile<DIM>));
    Tile<DIM>* tiles;                 // [warps, STAGES]
    Barrier* full;                    // [warps, STAGES]
    int* splits_before;               // of a decode, that were done before this one

    __device__ Shared() {
        extern __shared__ __align__(1024) uint4 memory[];  // as the swizzle counts from there
        tiles = reinterpret_cast<Tile<DIM>*>(memory);
        full = reinterpret_cast<Barrier*>(tiles + num_warps() * STAGES);
        splits_before = reinterpret_cast<int*>(full + num_warps() * STAGES);
    }

    __device__ WarpRing<DIM> ring(int warp) const { return {tiles + warp * STAGES, full + warp * STAGES}; }
    __device__ Found<DIM>& found(int warp) const { return *reinterpret_cast<Found<DIM>*>(tiles + warp * STAGES); }
};

// Calls work(head, its octet of columns) for those of a KV head, a thread each.
template <int DIM, typename Work>
__device__ void for_each_octet(const Launch& launch, Work work) {
    constexpr int OCTETS = DIM / VECTOR;
    for (int index = threadIdx.x; index < launch.group * OCTETS; index += blockDim.x) {
        work(index / OCTETS, index % OCTETS);
    }
}

template <typename Type, int DIM>
__device__ void store_mean(const Launch& launch, const Item& item, int head, int octet, const Columns& columns) {
    const long long row = (static_cast<long long>(item.row) * launch.num_kv_heads + item.kv_head) * launch.group;
    static_cast<uint4*>(launch.out)[(row + head) * (DIM / VECTOR) + octet] = columns.mean<Type>();
}

// The first of the rows that a split leaves for the last one.
__device__ long long split_row(const Launch& launch, const Plan& plan, const Item& item, int split) {
    const long long program = item.sequence * launch.num_kv_heads + item.kv_head;
    return (program * plan.num_splits + split) * launch.group;
}

template <typename Type, int DIM>
__device__ void finish_item(const Launch& launch, const Plan& plan, const Item& item, const Shared<DIM>& shared) {
    for_each_octet<DIM>(launch, [&](int head, int octet) {
        float peak = NO_PEAK;
        for (int warp = 0; warp < num_warps(); ++warp) peak = fmaxf(peak, shared.found(warp).weights[head].x);
        Columns columns;
        for (int warp = 0; warp < num_warps(); ++warp) {
            const Found<DIM>& found = shared.found(warp);
            const float4* sums = reinterpret_cast<const float4*>(found.sums[head]) + 2 * octet;
            columns.add(exp2_of(found.weights[head].x - peak), found.weights[head].y, sums[0], sums[1]);
        }
        if (item.active == 1) {
            store_mean<Type, DIM>(launch, item, head, octet, columns);
            return;
        }
        const long long row = split_row(launch, plan, item, item.split) + head;
        float4* sums = reinterpret_cast<float4*>(launch.sums + row * DIM) + 2 * octet;
        sums[0] = {columns.sum[0], columns.sum[1], columns.sum[2], columns.sum[3]};
        sums[1] = {columns.sum[4], columns.sum[5], columns.sum[6], columns.sum[7]};
        if (octet == 0) launch.weights[row] = {peak, columns.total};
    });
}

template <typename Type, int DIM>
__device__ void combine_splits(const Launch& launch, const Plan& plan, const Item& item) {
    for_each_octet<DIM>(launch, [&](int head, int octet) {
        float peak = NO_PEAK;
        for (int split = 0; split < item.active; ++split) {
            peak = fmaxf(peak, load_from_l2(launch.weights + split_row(launch, plan, item, split) + head).x);
        }
        Columns columns;
        for (int split = 0; split < item.active; ++split) {
            const long long row = split_row(launch, plan, item, split) + head;
            const float2 weight = load_from_l2(launch.weights + row);
            const float* sums = launch.sums + row * DIM + octet * VECTOR;
            columns.add(exp2_of(weight.x - peak), weight.y, load_from_l2(sums), load_from_l2(sums + 4));
        }
        store_mean<Type, DIM>(launch, item, head, octet, columns);
    });
}

// Whether this block is the last of those that share a decode. All threads have stored what they found.
__device__ bool is_last_split(const Launch& launch, const Item& item, int& splits_before) {
    int* counter = launch.counters + item.sequence * launch.num_kv_heads + item.kv_head;
    __syncthreads();
    if (threadIdx.x == 0) {
        splits_before = count_one(counter);
        if (splits_before == item.active - 1) *counter = 0;
    }
    __syncthreads();
    return splits_before == item.active - 1;
}

template <typename Type, int DIM>
__device__ void attend_item(const Launch& launch, const Plan& plan, const Item& item, const Shared<DIM>& shared,
                            WarpRing<DIM>& ring) {
    Tiles<DIM> tiles(launch, item, ring);
    tiles.ask(STAGES, item.position);
    wait_for_previous_kernel();
    tiles.ask(STAGES, item.position + KEYS);
    Softmax<Type, DIM> softmax;
    softmax.begin(launch, item);
    softmax.run(tiles);
    shared.found(warp_of_thread()).store(softmax);
    __syncthreads();
    finish_item<Type, DIM>(launch, plan, item, shared);
    if (item.active > 1 && is_last_split(launch, item, *shared.splits_before)) {
        combine_splits<Type, DIM>(launch, plan, item);
    }
    let_copies_follow();
    __syncthreads();                  // what the warps have found is read
}

// A block takes every gridDim.x-th item. Most of the later splits have no work: the lanes look for those that do.
template <typename Type, int DIM>
__device__ void attend(const Launch& launch) {
    let_next_kernel_start();
    const Shared<DIM> shared;
    WarpRing<DIM> ring = shared.ring(warp_of_thread());
    ring.make();
    const Plan plan(launch);
    const int end = plan.num_items(launch), first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
    for (int begin = first; begin < end; begin += 32 * step) {
        const int own = begin + lane_of_thread() * step;
        const Item item = plan.item(launch, min(own, end - 1));
        uint left = __ballot_sync(ALL_LANES, own < end && item.split < item.active);
        for (; left != 0; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            attend_item<Type, DIM>(launch, plan, plan.item(launch, begin + lane * step), shared, ring);
        }
    }
    wait_for_previous_kernel();       // blocks without work wait too: this kernel must not end before that one
}

#define DECODE(NAME, TYPE, DIM)                                                                                   \
    extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32) NAME(const __grid_constant__ Launch launch) {    \
        attend<TYPE, DIM>(launch);                                                                                \
    }

DECODE(decode_bfloat16_64, BFloat16, 64)
DECODE(decode_bfloat16_128, BFloat16, 128)
DECODE(decode_float16_64, Float16, 64)
DECODE(decode_float16_128, Float16, 128)
