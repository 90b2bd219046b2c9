/* What a decoder computes on a CPU: matrix products with packed weights, RMS norms, rotary embeddings, the writing of keys and
 * values to their blocks, paged attention, gated activations. Built by building.py, called through ctypes by library.py.
 *
 * Elements are float32 or bfloat16; sums are float32. A word is 32 bits: one float32, or two bfloat16 that are neighbours along
 * the axis that is summed over. All products are sums over words, of which `dot` takes one, so one kernel serves both.
 *
 * Every result depends on its own inputs alone, to the last bit: each sum runs over its words in one fixed order, whatever the
 * number of rows, of sequences or of threads. Keys are taken in tiles that begin at multiples of KEY_TILE of the sequence, so
 * that a token's attention is the same as part of a prompt and as a decode.
 *
 * Threads: a team that waits by spinning for a moment, then by sleeping. Work of a phase is taken piece by piece, so that a
 * thread that is delayed delays only its piece. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ALWAYS static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* A vector is a register of the processor. Sums of as many rows as registers hold are made together: ROWS of a product with
 * PANEL outputs, GROUP of attention with COLUMNS vectors. */
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12
#define GROUP 4
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define LANES 8
#define ROWS 3
#define GROUP 3
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#endif
#define COLUMNS 4
#define FEW_TILES 4 /* for which a panel is widened on its way into registers */

/* A value that is used several times: the compiler would read it from memory each time. */
#if defined(__AVX__) && LANES == 8
#define KEEP(x) __asm__("" : "+x"(x))
#else
#define KEEP(x) (void)0
#endif

/* Whether the processor multiplies pairs of bfloat16. Otherwise they are widened to float32 on their way into registers, and
 * attention's keys and values where they are packed. */
#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* Whether the processor multiplies whole tiles of bfloat16 (AMX). */
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && LANES == 16
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef float floats_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves_at __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t bytes_at __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint32_t word_at __attribute__((aligned(4), may_alias));

/* ------------------------------------------------------------------------------------------------------- elements */

ALWAYS floats splat(float x) { return x - (floats){0}; }

ALWAYS floats choose(ints where, floats a, floats b) {
    return (floats)((where & (ints)a) | (~where & (ints)b));
}

ALWAYS floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* The first of each word's two bfloat16, and the second. */
ALWAYS floats first_of(words x) { return (floats)(x << 16); }
ALWAYS floats second_of(words x) { return (floats)(x & 0xffff0000u); }

/* acc + the product of a word, `pairs` of bfloat16 or a float32, with each lane's. */
ALWAYS floats dot(const int pairs, floats acc, words b, uint32_t a) {
    if (!pairs) {
        float x;
        memcpy(&x, &a, 4);
        return fused(splat(x), (floats)b, acc);
    }
#if HAS_PAIRS
    return (floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)b, (__m512bh)_mm512_set1_epi32((int)a));
#else
    words both = a - (words){0};
    return fused(second_of(both), second_of(b), fused(first_of(both), first_of(b), acc));
#endif
}

ALWAYS floats load(const int bf16, const void *from, long i) {
    if (!bf16) return *(const floats_at *)((const float *)from + i);
    halves h = *(const halves_at *)((const uint16_t *)from + i);
    return (floats)(__builtin_convertvector(h, words) << 16);
}

ALWAYS halves to_bf16(floats x) {
#if defined(__AVX512BF16__)
    return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    words bits = (words)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    words is_nan = (words)(x != x);
    return __builtin_convertvector(((is_nan & (bits | 0x400000)) | (~is_nan & rounded)) >> 16, halves);
#endif
}

ALWAYS void store(const int bf16, void *to, long i, floats x) {
    if (bf16) *(halves_at *)((uint16_t *)to + i) = to_bf16(x);
    else *(floats_at *)((float *)to + i) = x;
}

ALWAYS void store_some(const int bf16, void *to, long i, floats x, long count) {
    if (count >= LANES) {
        store(bf16, to, i, x);
        return;
    }
    char buffer[64];
    store(bf16, buffer, 0, x);
    const int size = bf16 ? 2 : 4;
    memcpy((char *)to + i * size, buffer, count * size);
}

ALWAYS float add_lanes(floats x) {
    float sum[LANES / 2];
    for (int i = 0; i < LANES / 2; i++) sum[i] = x[i] + x[i + LANES / 2];
    for (int i = 0; i < LANES / 2 - 4; i++) sum[i] += sum[i + 4];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

ALWAYS floats larger(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

ALWAYS float largest_lane(floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX__)
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

/* 2 ** x by a polynomial of its fraction in [-0.5, 0.5]; relative error below 2e-7; 0 below -126. */
ALWAYS floats exp2_of(floats x) {
    x = choose(x < -127.0f, splat(-127.0f), x);
    x = choose(x > 127.0f, splat(127.0f), x);
    floats shifted = x + 12582912.0f; /* 1.5 * 2 ** 23: its last bits are the nearest integer */
    floats fraction = x - (shifted - 12582912.0f);
    floats y = splat(1.535336188e-4f);
    y = fused(y, fraction, splat(1.339887440e-3f));
    y = fused(y, fraction, splat(9.618437357e-3f));
    y = fused(y, fraction, splat(5.550332548e-2f));
    y = fused(y, fraction, splat(2.402264791e-1f));
    y = fused(y, fraction, splat(6.931472028e-1f));
    y = fused(y, fraction, splat(1.0f));
    ints exponent = (ints)shifted - 0x4b400000;
    floats scale = (floats)((exponent + 127) << 23);
    return choose(x <= -126.5f, splat(0.0f), y * scale);
}

ALWAYS floats sigmoid(floats x) { return 1.0f / (1.0f + exp2_of(x * -1.44269504f)); }

enum { SILU = 0, GELU_TANH = 1, RELU = 2 };

ALWAYS floats activate(int kind, floats x) {
    if (kind == SILU) return x * sigmoid(x);
    if (kind == GELU_TANH) return x * sigmoid(1.59576912f * fused(x * x * x, splat(0.044715f), x));
    return choose(x > 0.0f, x, splat(0.0f));
}

/* ----------------------------------------------------------------------------------------------------------- team */

#define SPINS 4000
#define MAX_THREADS 256

typedef struct {
    _Alignas(64) atomic_uint generation; /* of calls */
    _Alignas(64) atomic_uint passed;     /* barriers */
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_long taken[2]; /* pieces of the phase, by its parity; the other is 0 */
    struct { _Alignas(64) atomic_long taken[2]; } shares[MAX_THREADS]; /* the same, of each thread's share of them */
    atomic_int num_sleeping;
    int num_threads;
    void (*function)(void *team, int thread, const void *argument);
    const void *argument;
    pthread_mutex_t in_use;
    int num_cpus, cpus[MAX_THREADS], caller_cpu; /* that the process may use; num_cpus 0: not one for each thread */
    int niceness;
    pthread_t threads[MAX_THREADS];
    atomic_int ids[MAX_THREADS]; /* the kernel's, of the threads; 0 until they run */
    struct start { void *team; int thread; } starts[MAX_THREADS];
} Team;

typedef struct {
    Team *team;
    int parity, thread;
    int helped; /* threads whose share is done, this one first */
} Worker;

ALWAYS void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void await_change(Team *team, atomic_uint *value, unsigned old) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(value, memory_order_acquire) != old) return;
        relax();
    }
    atomic_fetch_add(&team->num_sleeping, 1);
    while (atomic_load(value) == old) syscall(SYS_futex, value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&team->num_sleeping, 1);
}

static void change(Team *team, atomic_uint *value) {
    atomic_fetch_add(value, 1);
    if (atomic_load(&team->num_sleeping)) syscall(SYS_futex, value, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}

/* The next piece of this phase. */
ALWAYS long take(Worker *worker) {
    return atomic_fetch_add_explicit(&worker->team->taken[worker->parity], 1, memory_order_relaxed);
}

/* The next piece of a phase of `count`, or `count`: each thread's own share is in one row, so that it reads memory in one row,
 * then what is left of the others'. */
ALWAYS long take_near(Worker *worker, long count) {
    Team *team = worker->team;
    for (; worker->helped < team->num_threads; worker->helped++) {
        const long owner = (worker->thread + worker->helped) % team->num_threads;
        const long first = count * owner / team->num_threads, end = count * (owner + 1) / team->num_threads;
        atomic_long *taken = &team->shares[owner].taken[worker->parity];
        const long piece = first + atomic_fetch_add_explicit(taken, 1, memory_order_relaxed);
        if (piece < end) return piece;
    }
    return count;
}

/* Ends a phase: all its pieces are done when it returns. */
static void sync_team(Worker *worker) {
    Team *team = worker->team;
    unsigned passed = atomic_load(&team->passed);
    if (atomic_fetch_add(&team->arrived, 1) + 1 == team->num_threads) {
        atomic_store(&team->arrived, 0);
        atomic_store(&team->taken[worker->parity], 0);
        change(team, &team->passed);
    } else {
        await_change(team, &team->passed, passed);
    }
    worker->parity ^= 1;
    worker->helped = 0;
    /* nobody takes of the last phase any more */
    atomic_store_explicit(&team->shares[worker->thread].taken[worker->parity ^ 1], 0, memory_order_relaxed);
}

static void *team_member(void *start) {
    Team *team = ((struct start *)start)->team;
    int thread = ((struct start *)start)->thread;
    atomic_store(&team->ids[thread], (int)syscall(SYS_gettid));
    for (unsigned generation = 0;; generation++) {
        await_change(team, &team->generation, generation);
        team->function(team, thread, team->argument);
    }
    return NULL;
}

static int may_use_tiles; /* 0 until the kernel has been asked */

#if HAS_TILES
static pthread_once_t tiles_are_asked_for = PTHREAD_ONCE_INIT;

/* Asks the kernel for the registers of tiles, of all threads and children of the process. */
static void ask_for_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    may_use_tiles = !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}
#endif

/* NULL: no memory, or no threads. Lives as long as the process. */
Team *tideway_team(int num_threads) {
    Team *team = NULL;
    if (num_threads < 1 || num_threads > MAX_THREADS || posix_memalign((void **)&team, 64, sizeof(Team))) return NULL;
    memset(team, 0, sizeof(Team));
    team->num_threads = num_threads;
    team->caller_cpu = -1;
    pthread_mutex_init(&team->in_use, NULL);
#if HAS_TILES
    pthread_once(&tiles_are_asked_for, ask_for_tiles);
#endif
    cpu_set_t allowed;
    if (!sched_getaffinity(0, sizeof allowed, &allowed) && CPU_COUNT(&allowed) == num_threads)
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &allowed)) team->cpus[team->num_cpus++] = cpu;
    for (int i = 1; i < num_threads; i++) {
        team->starts[i].team = team;
        team->starts[i].thread = i;
        if (pthread_create(&team->threads[i], NULL, team_member, &team->starts[i])) return NULL;
        pthread_detach(team->threads[i]);
    }
    return team;
}

/* Whether products of bfloat16 are made by the processor's whole tiles. Known when there is a team. */
int tideway_has_tiles(void) { return may_use_tiles; }

/* Members yield to what their caller yields to. */
static void take_niceness(Team *team) {
    int niceness = getpriority(PRIO_PROCESS, 0);
    if (niceness == team->niceness) return;
    int known = 1;
    for (int thread = 1; thread < team->num_threads; thread++) {
        int id = atomic_load(&team->ids[thread]);
        if (id) setpriority(PRIO_PROCESS, id, niceness);
        else known = 0;
    }
    if (known) team->niceness = niceness;
}

/* Each member gets a core that is not the caller's: two that share one would wait for each other by turns. */
static void spread(Team *team) {
    int cpu = sched_getcpu(), thread = 1;
    if (cpu == team->caller_cpu) return;
    team->caller_cpu = cpu;
    for (int i = 0; i < team->num_cpus && thread < team->num_threads; i++) {
        if (team->cpus[i] == cpu) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(team->cpus[i], &one);
        pthread_setaffinity_np(team->threads[thread++], sizeof one, &one);
    }
}

/* Keeps the caller on its core; 0: it is not kept. */
static int bind_caller(cpu_set_t *before) {
    cpu_set_t one;
    if (sched_getaffinity(0, sizeof *before, before)) return 0;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    return !sched_setaffinity(0, sizeof one, &one);
}

/* Every `function` ends in `sync_team`, after an even number of phases, and then looks at nothing of the argument. */
static void run_team(Team *team, void (*function)(void *, int, const void *), const void *argument) {
    pthread_mutex_lock(&team->in_use);
    if (team->num_threads > 1) take_niceness(team);
    cpu_set_t before;
    /* Or who wakes beside it would move it to a core where a member is. */
    const int is_bound = team->num_cpus > 1 && bind_caller(&before);
    if (is_bound) spread(team);
    team->function = function;
    team->argument = argument;
    change(team, &team->generation);
    function(team, 0, argument);
    if (is_bound) sched_setaffinity(0, sizeof before, &before);
    pthread_mutex_unlock(&team->in_use);
}

ALWAYS void even_phases(Worker *worker) {
    if (worker->parity) sync_team(worker);
}

/* ---------------------------------------------------------------------------------------------------------- ranks */

/* Processes of one machine that compute one model together, and what they tell each other through memory that all map. A call
 * is made by all of them, in one order. Of three calls in a row no two use the same slots but the first and the last, and who
 * makes the last has seen that all made the second, so that nobody still reads the first's. */

#define RANK_SPINS 20000

typedef struct {
    _Alignas(64) atomic_uint calls; /* whose part of this rank can be read */
} Arrival;

typedef struct {
    Arrival *arrivals;      /* [size]; then the number of ranks that sleep, as one more */
    char *slots;            /* [2, size, slot_bytes] */
    int64_t slot_bytes;     /* a multiple of 64 */
    int64_t timeout_ns;     /* for the others to come */
    int32_t rank, size;
    uint32_t calls;
    int32_t is_lost;        /* a rank did not come: the group is of no more use */
} Ranks;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int has_come(const Ranks *ranks, int rank) {
    return (int32_t)(atomic_load(&ranks->arrivals[rank].calls) - ranks->calls) >= 0;
}

/* Returns when that rank's part can be read; 0: it did not come in time. */
static int await_rank(const Ranks *ranks, int rank) {
    for (int i = 0; i < RANK_SPINS; i++) {
        if (has_come(ranks, rank)) return 1;
        relax();
    }
    atomic_uint *num_sleeping = &ranks->arrivals[ranks->size].calls;
    const int64_t end = now_ns() + ranks->timeout_ns;
    atomic_fetch_add(num_sleeping, 1);
    int came;
    while (!(came = has_come(ranks, rank)) && now_ns() < end) {
        unsigned calls = atomic_load(&ranks->arrivals[rank].calls);
        const struct timespec slice = {0, 100000000};
        if (!has_come(ranks, rank)) syscall(SYS_futex, &ranks->arrivals[rank].calls, FUTEX_WAIT, calls, &slice, NULL, 0);
    }
    atomic_fetch_sub(num_sleeping, 1);
    return came;
}

/* Shows `bytes` to the other ranks and waits for theirs. The slots, one a rank; NULL: not all came. */
static const char *exchange(Ranks *ranks, const void *data, long bytes) {
    if (ranks->is_lost) return NULL;
    char *slots = ranks->slots + (ranks->calls & 1) * ranks->size * ranks->slot_bytes;
    memcpy(slots + ranks->rank * ranks->slot_bytes, data, bytes);
    ranks->calls++;
    atomic_uint *calls = &ranks->arrivals[ranks->rank].calls;
    atomic_store(calls, ranks->calls);
    if (atomic_load(&ranks->arrivals[ranks->size].calls)) syscall(SYS_futex, calls, FUTEX_WAKE, MAX_THREADS, NULL, NULL, 0);
    for (int rank = 0; rank < ranks->size; rank++)
        if (rank != ranks->rank && !await_rank(ranks, rank)) {
            ranks->is_lost = 1;
            return NULL;
        }
    return slots;
}

/* data = the sum of all ranks' in float32, in their order, so that it has the same bits on all. */
ALWAYS void sum_over_ranks(const int bf16, Ranks *ranks, void *data, long count) {
    const long size = bf16 ? 2 : 4, most = ranks->slot_bytes / size;
    for (long begin = 0; begin < count; begin += most) {
        const long length = count - begin < most ? count - begin : most;
        char *part = (char *)data + begin * size;
        const char *slots = exchange(ranks, part, length * size);
        if (!slots) return;
        for (long i = 0; i < length; i += LANES) {
            floats sum = load(bf16, slots, i);
            for (int rank = 1; rank < ranks->size; rank++) sum += load(bf16, slots + rank * ranks->slot_bytes, i);
            store_some(bf16, part, i, sum, length - i);
        }
    }
}

/* 0: a rank is lost. */
int tideway_sum_over_ranks(Ranks *ranks, void *data, int64_t count, int is_bf16) {
    if (is_bf16) sum_over_ranks(1, ranks, data, count);
    else sum_over_ranks(0, ranks, data, count);
    return !ranks->is_lost;
}

/* out [rows, size * row_bytes]: each rank's rows beside each other, in their order; row_bytes <= slot_bytes. 0: a rank is lost. */
int tideway_join_over_ranks(Ranks *ranks, const char *rows, int64_t num_rows, int64_t row_bytes, char *out) {
    const long most = ranks->slot_bytes / row_bytes;
    for (long begin = 0; begin < num_rows; begin += most) {
        const long count = num_rows - begin < most ? num_rows - begin : most;
        const char *slots = exchange(ranks, rows + begin * row_bytes, count * row_bytes);
        if (!slots) return 0;
        for (int rank = 0; rank < ranks->size; rank++)
            for (long row = 0; row < count; row++)
                memcpy(out + ((begin + row) * ranks->size + rank) * row_bytes,
                       slots + rank * ranks->slot_bytes + row * row_bytes, row_bytes);
    }
    return 1;
}

/* -------------------------------------------------------------------------------------------------------- linear */

#define PANEL 32 /* outputs */
#define HALF_PANEL (PANEL / 2)
#define PANEL_VECTORS (PANEL / LANES)

enum { WORDS = 0, INT8 = 1, INT4 = 2 };

/* Weights of few bits are whole numbers that bfloat16 holds exactly; the sums of their products over a group of inputs are
 * multiplied by its scales. */
typedef struct {
    const void *weight;  /* WORDS: [panels, in_words, PANEL] words; outputs beyond the last are 0
                          * INT8: [panels, in_words, 2, 2, HALF_PANEL]: of 16 outputs the first inputs of their words, then the second
                          * INT4: [panels, in_words, HALF_PANEL, 2]: outputs i and 16 + i in the low and the high 4 bits */
    const float *bias;   /* [panels * PANEL], or NULL */
    const float *scales; /* [panels, groups, PANEL], unless WORDS */
    const words *zeros;  /* INT4: [panels, groups, PANEL] words: 16 less the zero, in both halves */
    int64_t in_words, num_outputs, group_words;
    int32_t kind;
} Linear;

ALWAYS floats to_floats(const char *from) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
    return __builtin_convertvector(*(const bytes_at *)from, floats);
#endif
}

/* What turns the 4 bits of INT4 into bfloat16, in a group. */
typedef struct {
    words numbers;    /* -16 .. 15 as bfloat16, where one vector holds them */
    words zeros[PANEL_VECTORS];
} Fours;

ALWAYS Fours fours_of(const Linear *linear, long panel, long group) {
    Fours found;
    uint16_t *numbers = (uint16_t *)&found.numbers;
    UNROLL for (int i = 0; i < 2 * LANES; i++) {
        float number = (float)(i - 16);
        uint32_t bits;
        memcpy(&bits, &number, 4);
        numbers[i] = bits >> 16;
    }
    const words *zeros = linear->zeros + (panel * (linear->in_words / linear->group_words) + group) * PANEL_VECTORS;
    UNROLL for (int v = 0; v < PANEL_VECTORS; v++) found.zeros[v] = zeros[v];
    return found;
}

ALWAYS long bytes_of(const int kind) { return kind == WORDS ? PANEL * 4 : kind == INT8 ? PANEL * 2 : PANEL; }

/* A panel's word k of each output. `at`: of its word 0. */
ALWAYS void panel_words(const int kind, const char *at, long k, const Fours *fours, words b[PANEL_VECTORS]) {
    at += k * bytes_of(kind);
    if (kind == WORDS) {
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++) b[v] = ((const words *)at)[v];
    } else if (kind == INT8) {
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
            const char *first = at + v * LANES / HALF_PANEL * PANEL + v * LANES % HALF_PANEL;
            words low = (words)to_floats(first), high = (words)to_floats(first + HALF_PANEL);
            b[v] = low >> 16 | (high & 0xffff0000u);
        }
    } else {
#if defined(__AVX512BW__)
        __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)at));
        __m512i low = _mm512_add_epi16(_mm512_and_si512(both, _mm512_set1_epi16(15)), (__m512i)fours->zeros[0]);
        __m512i high = _mm512_add_epi16(_mm512_srli_epi16(both, 4), (__m512i)fours->zeros[1]);
        b[0] = (words)_mm512_permutexvar_epi16(low, (__m512i)fours->numbers);
        b[1] = (words)_mm512_permutexvar_epi16(high, (__m512i)fours->numbers);
#else
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
            words both = __builtin_convertvector(*(const halves_at *)(at + v * LANES % HALF_PANEL * 2), words);
            if (v * LANES >= HALF_PANEL) both >>= 4;
            words first = (both & 15) + (fours->zeros[v] & 0xffff) - 16, second = (both >> 8 & 15) + (fours->zeros[v] >> 16) - 16;
            b[v] = (words)__builtin_convertvector((ints)first, floats) >> 16 |
                   ((words)__builtin_convertvector((ints)second, floats) & 0xffff0000u);
        }
#endif
    }
}

ALWAYS void clear(const int rows, floats acc[ROWS][PANEL_VECTORS]) {
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = splat(0.0f);
}

/* What is multiplied. WIDENED: inputs that were made float32 beforehand, with words of bfloat16 that become it here. */
enum { FLOATS = 0, PAIRS = 1, WIDENED = 2 };

/* acc += x [rows], one number each, x the weights of a panel. */
ALWAYS void add_products(const int rows, const float *x, long x_stride, const floats weights[PANEL_VECTORS],
                         floats acc[ROWS][PANEL_VECTORS]) {
    floats of_rows[ROWS];
    UNROLL for (int r = 0; r < rows; r++) of_rows[r] = splat(x[r * x_stride]);
    UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
        floats kept = weights[v];
        KEEP(kept);
        UNROLL for (int r = 0; r < rows; r++) acc[r][v] = fused(of_rows[r], kept, acc[r][v]);
    }
}

/* acc = a [rows, words first .. end - 1] x a panel's; `a_stride` in words, of which WIDENED have two for each of the panel's. */
ALWAYS void tile(const int form, const int kind, const int rows, const uint32_t *a, long a_stride, const char *panel,
                 const Fours *fours, long first, long end, floats acc[ROWS][PANEL_VECTORS]) {
    const float *x = (const float *)a;
    clear(rows, acc);
    for (long k = first; k < end; k++) {
        words b[PANEL_VECTORS];
        floats weights[PANEL_VECTORS];
        /* where nothing but the reading takes time, the processor's own guess is better */
        if (rows > 1 || kind != WORDS)
            UNROLL for (long i = 0; i < bytes_of(kind); i += 64) __builtin_prefetch(panel + k * bytes_of(kind) + 4096 + i);
        panel_words(kind, panel, k, fours, b);
        if (form == PAIRS) {
            UNROLL for (int r = 0; r < rows; r++) {
                uint32_t word = ((const word_at *)a)[r * a_stride + k];
                UNROLL for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = dot(1, acc[r][v], b[v], word);
            }
        } else if (form == FLOATS) {
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++) weights[v] = (floats)b[v];
            add_products(rows, x + k, a_stride, weights, acc);
        } else {
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++) weights[v] = first_of(b[v]);
            add_products(rows, x + 2 * k, a_stride, weights, acc);
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++) weights[v] = second_of(b[v]);
            add_products(rows, x + 2 * k + 1, a_stride, weights, acc);
        }
    }
}

/* `tile` of a whole panel of few bits, or of its words when it was unpacked. */
ALWAYS void grouped_tile(const int form, const int kind, const int rows, const uint32_t *a, long a_stride, const Linear *linear, long panel,
                         const char *at, floats acc[ROWS][PANEL_VECTORS]) {
    const long groups = linear->in_words / linear->group_words, length = linear->group_words * (form == FLOATS ? 2 : 1);
    clear(rows, acc);
    for (long group = 0; group < groups; group++) {
        floats sums[ROWS][PANEL_VECTORS];
        Fours fours;
        if (kind == INT4) fours = fours_of(linear, panel, group);
        tile(form, kind, rows, a, a_stride, at, &fours, group * length, (group + 1) * length, sums);
        const float *scales = linear->scales + (panel * groups + group) * PANEL;
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
            floats scale = *(const floats_at *)(scales + v * LANES);
            UNROLL for (int r = 0; r < rows; r++) acc[r][v] = fused(sums[r][v], scale, acc[r][v]);
        }
    }
}

/* Of a linear layer by a LoRA adapter: x A^T B^T is added to its product. */
typedef struct {
    Linear a, b; /* WORDS; weight NULL: none */
} Change;

typedef struct {
    const Change *const *of_rows; /* [rows]: a row's adapter, by layer those of qkv, out, gate_up and down; NULL: it has none */
    char *lowered;                /* [rows, stride] bytes to work in: x A^T, with zeros up to a multiple of PANEL */
    int64_t stride;
} Changes;

typedef struct {
    const Linear *linear;
    const void *x; /* [rows, in_words] words, row stride in words */
    int64_t num_rows, x_stride;
    void *out; /* [rows, num_outputs] elements, row stride in elements */
    int64_t out_stride;
    int32_t gated; /* a panel is 16 gates, then their 16 ups: [rows, num_outputs / 2] come out */
    int32_t activation;
    const Changes *changes; /* NULL: no row has any */
    int64_t change;         /* which of an adapter's */
} Product;

ALWAYS const Change *change_of(const Product *p, long row) {
    const Change *adapter = p->changes->of_rows[row];
    return adapter && adapter[p->change].a.weight ? adapter + p->change : NULL;
}

/* Rows of one adapter that are computed together. */
#define RUN (ROWS < 4 ? ROWS : 4)

static int is_run(const Product *p, long row, long end) {
    if (row + RUN > end) return 0;
    for (int i = 1; i < RUN; i++)
        if (p->changes->of_rows[row + i] != p->changes->of_rows[row]) return 0;
    return 1;
}

ALWAYS void lower_rows(const int bf16, const int rows, const Product *p, long row) {
    const Change *change = change_of(p, row);
    if (!change) return;
    const uint32_t *x = (const uint32_t *)p->x + row * p->x_stride;
    for (long first = 0; first < change->a.num_outputs; first += PANEL) {
        const char *panel = (const char *)change->a.weight + first * change->a.in_words * 4;
        floats acc[ROWS][PANEL_VECTORS];
        tile(bf16, WORDS, rows, x, p->x_stride, panel, NULL, 0, change->a.in_words, acc);
        UNROLL for (int r = 0; r < rows; r++)
            for (int i = 0; i < PANEL_VECTORS; i++)
                store(bf16, p->changes->lowered + (row + r) * p->changes->stride, first + i * LANES, acc[r][i]);
    }
}

/* x A^T of the rows that have changes. A phase. */
static void lower(const int bf16, Worker *worker, const Product *p) {
    for (long row; (row = take(worker)) < p->num_rows;) {
        const long first = row - row % RUN;
        if (!is_run(p, first, p->num_rows)) lower_rows(bf16, 1, p, row);
        else if (row == first) lower_rows(bf16, RUN, p, row);
    }
    sync_team(worker);
}

ALWAYS void raise_rows(const int bf16, const int rows, const Product *p, long panel, long row, floats (*sums)[PANEL_VECTORS]) {
    const Change *change = change_of(p, row);
    if (!change) return;
    const uint32_t *lowered = (const uint32_t *)(p->changes->lowered + row * p->changes->stride);
    const char *at = (const char *)change->b.weight + panel * change->b.in_words * PANEL * 4;
    floats acc[ROWS][PANEL_VECTORS];
    tile(bf16, WORDS, rows, lowered, p->changes->stride / 4, at, NULL, 0, change->b.in_words, acc);
    UNROLL for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] += acc[r][v];
}

/* sums [rows] += a panel of (x A^T) B^T. */
static __attribute__((noinline)) void add_changes(int bf16, const Product *p, long panel, long row, int rows, floats (*sums)[PANEL_VECTORS]) {
    for (int r = 0, taken; r < rows; r += taken) {
        taken = is_run(p, row + r, row + rows) ? RUN : 1;
        if (bf16 && taken == RUN) raise_rows(1, RUN, p, panel, row + r, sums + r);
        else if (bf16) raise_rows(1, 1, p, panel, row + r, sums + r);
        else if (taken == RUN) raise_rows(0, RUN, p, panel, row + r, sums + r);
        else raise_rows(0, 1, p, panel, row + r, sums + r);
    }
}

/* Stores what comes of a panel's sums of a row, which it changes. */
ALWAYS void put_sums(const int bf16, const Product *p, long panel, long row, floats sum[PANEL_VECTORS]) {
    const Linear *linear = p->linear;
    const float *bias = linear->bias ? linear->bias + panel * PANEL : NULL;
    const int gates = PANEL_VECTORS / 2;
    if (bias) UNROLL for (int v = 0; v < PANEL_VECTORS; v++) sum[v] += *(const floats_at *)(bias + v * LANES);
    if (p->gated) UNROLL for (int v = 0; v < gates; v++) sum[v] = activate(p->activation, sum[v]) * sum[gates + v];
    const long begin = p->gated ? panel * HALF_PANEL : panel * PANEL;
    const long left = (p->gated ? linear->num_outputs / 2 : linear->num_outputs) - begin;
    UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
        if (v * LANES < left && (!p->gated || v < gates))
            store_some(bf16, p->out, row * p->out_stride + begin + v * LANES, sum[v], left - v * LANES);
}

/* `unpacked`: of `unpacked_panel`, or NULL; `widened`: the rows from `row` on, where there are no pairs. */
ALWAYS void panel_rows(const int bf16, const int kind, const int rows, const Product *p, long panel, long row,
                       const words *unpacked, const float *widened) {
    const Linear *linear = p->linear;
    const int form = !bf16 ? FLOATS : HAS_PAIRS ? PAIRS : WIDENED;
    const uint32_t *x = form == WIDENED ? (const uint32_t *)widened : (const uint32_t *)p->x + row * p->x_stride;
    const long x_stride = form == WIDENED ? 2 * linear->in_words : p->x_stride;
    const char *at = (const char *)linear->weight + panel * linear->in_words * bytes_of(kind);
    floats acc[ROWS][PANEL_VECTORS];
    const int unpacked_form = HAS_PAIRS ? PAIRS : FLOATS;
    if (!HAS_PAIRS && unpacked && linear->kind == WORDS)
        tile(FLOATS, WORDS, rows, x, x_stride, (const char *)unpacked, NULL, 0, x_stride, acc);
    else if (unpacked) grouped_tile(unpacked_form, WORDS, rows, x, x_stride, linear, panel, (const char *)unpacked, acc);
    else if (kind != WORDS) grouped_tile(form, kind, rows, x, x_stride, linear, panel, at, acc);
    else tile(form, WORDS, rows, x, x_stride, at, NULL, 0, linear->in_words, acc);
    if (p->changes) {
        floats sums[ROWS][PANEL_VECTORS]; /* a copy: those above stay in registers */
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] = acc[r][v];
        add_changes(bf16, p, panel, row, rows, sums);
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = sums[r][v];
    }
    UNROLL for (int r = 0; r < rows; r++) put_sums(bf16, p, panel, row + r, acc[r]);
}

static void panel_tail(const int bf16, int rows, const Product *p, long panel, long row, const words *unpacked,
                       const float *widened) {
#define TAIL(n) \
    case n: \
        if (unpacked) panel_rows(1, WORDS, n, p, panel, row, unpacked, widened); \
        else if (p->linear->kind == INT8) panel_rows(1, INT8, n, p, panel, row, NULL, widened); \
        else if (p->linear->kind == INT4) panel_rows(1, INT4, n, p, panel, row, NULL, widened); \
        else if (bf16) panel_rows(1, WORDS, n, p, panel, row, NULL, widened); \
        else panel_rows(0, WORDS, n, p, panel, row, NULL, widened); \
        break;
    switch (rows) {
        TAIL(1) TAIL(2) TAIL(3)
#if ROWS == 12
        TAIL(4) TAIL(5) TAIL(6) TAIL(7) TAIL(8) TAIL(9) TAIL(10) TAIL(11) TAIL(12)
#endif
    }
#undef TAIL
}

typedef struct {
    void *at;
    long bytes;
} Space;

/* At least as much as is asked for, for this thread alone, from the last call's. NULL: there is no memory for it. */
static void *take_space(Space *space, long bytes) {
    if (bytes > space->bytes) {
        free(space->at);
        *space = (Space){NULL, 0};
        if (posix_memalign(&space->at, 64, bytes)) return space->at = NULL;
        space->bytes = bytes;
    }
    return space->at;
}

ALWAYS void unpack(const int kind, const Linear *linear, long panel, words *to) {
    const long per_word = HAS_PAIRS ? 1 : 2, step = PANEL_VECTORS * per_word;
    const long length = kind == INT4 ? linear->group_words : linear->in_words;
    const char *at = (const char *)linear->weight + panel * linear->in_words * bytes_of(kind);
    for (long first = 0; first < linear->in_words; first += length) {
        Fours fours;
        if (kind == INT4) fours = fours_of(linear, panel, first / length);
        for (long k = first; k < first + length; k++) {
            words b[PANEL_VECTORS];
            __builtin_prefetch(at + k * bytes_of(kind) + 4096);
            panel_words(kind, at, k, &fours, b);
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
                to[k * step + v] = HAS_PAIRS ? b[v] : (words)first_of(b[v]);
                if (!HAS_PAIRS) to[k * step + PANEL_VECTORS + v] = (words)second_of(b[v]);
            }
        }
    }
}

/* A panel to be used several times, or by tiles: of few bits as words; where there are no pairs, [2 * in_words, PANEL] float32.
 * NULL: there is no memory for it. */
static const words *unpacked_panel(const Linear *linear, long panel) {
    static _Thread_local Space space;
    words *to = take_space(&space, linear->in_words * PANEL_VECTORS * (HAS_PAIRS ? 1 : 2) * sizeof(words));
    if (!to) return NULL;
    if (linear->kind == WORDS) unpack(WORDS, linear, panel, to);
    else if (linear->kind == INT8) unpack(INT8, linear, panel, to);
    else unpack(INT4, linear, panel, to);
    return to;
}

/* Rows of bfloat16 inputs as float32, [rows, 2 * in_words]. */
static const float *widened_rows(const Product *p, long row, long rows) {
    static _Thread_local Space space;
    const long width = 2 * p->linear->in_words;
    float *to = take_space(&space, rows * width * 4);
    if (!to) abort();
    for (long r = 0; r < rows; r++) {
        const uint32_t *from = (const uint32_t *)p->x + (row + r) * p->x_stride;
        long i = 0;
        for (; i + LANES <= width; i += LANES) store(0, to + r * width, i, load(1, from, i));
        for (; i < width; i++) ((uint32_t *)to)[r * width + i] = (uint32_t)((const uint16_t *)from)[i] << 16;
    }
    return to;
}

#define TILE 16                     /* rows of a tile; each has 16 words */
#if HAS_TILES
#define TILED_ROWS (2 * TILE)       /* whose sums with a panel are made together */
#define TILED_WORDS (8 * TILE)      /* of these rows and of a panel, that lie in a core's first cache together */
#define TILED_GROUP_BYTES (1 << 20) /* of inputs that lie in its second cache */
#define MOST_TILES 16               /* of these rows, whose sums are kept meanwhile */

/* What was written so far lies in memory: the compiler does not know that tiles are read there. */
ALWAYS void is_written(void) { __asm__ volatile("" ::: "memory"); }

/* Registers 0 and 1 have sums of `low` rows, 2 and 3 of `high`, 4 and 5 their inputs, 6 and 7 weights. */
static void shape_tiles(long low, long high) {
    struct { uint8_t palette, first_row, unused[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    const uint8_t rows[8] = {low, low, high, high, low, high, TILE, TILE};
    memcpy(shape.rows, rows, sizeof rows);
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = rows[i] ? 64 : 0;
    is_written();
    _tile_loadconfig(&shape);
}

/* sums [rows] += x [rows <= TILED_ROWS, words first .. end - 1] x a panel's, from 0 if `first` is. Each sum runs over its words
 * in one order, whatever the rows. */
static void add_tiles(long rows, const uint32_t *x, long x_stride, const char *panel, long first, long end,
                      floats (*sums)[PANEL_VECTORS]) {
    const char *low = (const char *)x, *high = low + TILE * 4 * x_stride;
    const long step = PANEL * 4, stride = 4 * x_stride;
    char *low_sums = (char *)sums, *high_sums = (char *)(sums + TILE);
    const int has_high = rows > TILE;
    is_written();
    if (first) {
        _tile_loadd(0, low_sums, step);
        _tile_loadd(1, low_sums + 64, step);
        if (has_high) {
            _tile_loadd(2, high_sums, step);
            _tile_loadd(3, high_sums + 64, step);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (has_high) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (long k = first; k < end; k += TILE) {
        _tile_loadd(6, panel + k * step, step);
        _tile_loadd(4, low + k * 4, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + k * step + 64, step);
        _tile_dpbf16ps(1, 4, 7);
        if (has_high) {
            _tile_loadd(5, high + k * 4, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, low_sums, step);
    _tile_stored(1, low_sums + 64, step);
    if (has_high) {
        _tile_stored(2, high_sums, step);
        _tile_stored(3, high_sums + 64, step);
    }
}

static int is_tiled(const Linear *linear) {
    const long words = linear->kind == WORDS ? linear->in_words : linear->group_words;
    return words % TILE == 0 && may_use_tiles;
}

/* sums [rows] += scales * x [rows <= TILED_ROWS, `count` words] x a group's of a panel, from 0 if it is the `first`. */
static void add_scaled_tiles(long rows, const uint32_t *x, long x_stride, const char *panel, long count, const float *scales,
                             int is_first, floats (*sums)[PANEL_VECTORS]) {
    floats parts[TILED_ROWS][PANEL_VECTORS], zero = splat(0.0f);
    add_tiles(rows, x, x_stride, panel, 0, count, parts);
    for (long r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
            sums[r][v] = fused(parts[r][v], *(const floats_at *)(scales + v * LANES), is_first ? zero : sums[r][v]);
}

/* As `multiply`, of bfloat16. */
static void multiply_by_tiles(Worker *worker, const Product *p) {
    static _Thread_local Space space;
    const Linear *linear = p->linear;
    const int is_scaled = linear->kind != WORDS;
    const long in_words = linear->in_words, panels = (linear->num_outputs + PANEL - 1) / PANEL;
    /* as even as whole tiles allow, and none empty */
    const long fits = TILED_GROUP_BYTES / (4 * in_words) / TILED_ROWS, tiles = (p->num_rows + TILED_ROWS - 1) / TILED_ROWS;
    const long most = fits < 2 ? 2 : fits > MOST_TILES ? MOST_TILES : fits, least = (tiles + most - 1) / most;
    const long group = (least ? (tiles + least - 1) / least : 1) * TILED_ROWS, groups = (p->num_rows + group - 1) / group;
    floats(*sums)[PANEL_VECTORS] = take_space(&space, group * sizeof(*sums));
    if (!sums) abort();
    long shaped = 0;
    for (long piece; (piece = take_near(worker, panels * groups)) < panels * groups;) {
        const long panel = piece % panels, first = piece / panels * group;
        const long end = first + group < p->num_rows ? first + group : p->num_rows;
        const long step = is_scaled ? linear->group_words : end - first > TILED_ROWS ? TILED_WORDS : in_words;
        const char *at = is_scaled ? (const char *)unpacked_panel(linear, panel)
                                   : (const char *)linear->weight + panel * in_words * bytes_of(WORDS);
        const float *scales = is_scaled ? linear->scales + panel * (in_words / step) * PANEL : NULL;
        if (!at) abort();
        for (long k = 0; k < in_words; k += step) {
            const long stop = k + step < in_words ? k + step : in_words;
            for (long row = first; row < end; row += TILED_ROWS) {
                const long rows = row + TILED_ROWS < end ? TILED_ROWS : end - row;
                const uint32_t *x = (const uint32_t *)p->x + row * p->x_stride;
                floats(*of_rows)[PANEL_VECTORS] = sums + (row - first);
                if (rows != shaped) shape_tiles(rows < TILE ? rows : TILE, rows < TILE ? 0 : rows - TILE);
                shaped = rows;
                if (is_scaled)
                    add_scaled_tiles(rows, x + k, p->x_stride, at + k * bytes_of(WORDS), step, scales + k / step * PANEL, !k,
                                     of_rows);
                else add_tiles(rows, x, p->x_stride, at, k, stop, of_rows);
                if (stop < in_words) continue;
                if (p->changes) add_changes(1, p, panel, row, (int)rows, of_rows);
                for (long r = 0; r < rows; r++) put_sums(1, p, panel, row + r, of_rows[r]);
            }
        }
    }
    if (shaped) _tile_release();
    sync_team(worker);
}
#endif

/* A phase, or two with changes. Many rows are cut, so that those of one piece stay in the cache of a core, and few panels still
 * make many pieces. */
static void multiply(const int bf16, Worker *worker, const Product *p) {
    if (p->changes) lower(bf16, worker, p);
#if HAS_TILES
    if (bf16 && is_tiled(p->linear)) return multiply_by_tiles(worker, p);
#endif
    const long panels = (p->linear->num_outputs + PANEL - 1) / PANEL;
    long group = 240, groups = (p->num_rows + group - 1) / group;
    if (groups > 1) group = ((p->num_rows + groups - 1) / groups + ROWS - 1) / ROWS * ROWS;
    const float *widened = NULL;
    long first_widened = -1;
    for (long piece; (piece = take_near(worker, panels * groups)) < panels * groups;) {
        long panel = piece % panels, row = piece / panels * group;
        long end = row + group < p->num_rows ? row + group : p->num_rows;
        if (bf16 && !HAS_PAIRS && row != first_widened) {
            widened = widened_rows(p, row, end - row);
            first_widened = row;
        }
        /* tiles of almost equal height: 12 + 12 + 8 takes as long as 11 + 11 + 10 at best */
        long tiles = (end - row + ROWS - 1) / ROWS;
        const int is_dear = p->linear->kind != WORDS ? tiles > 1 : bf16 && !HAS_PAIRS && tiles > FEW_TILES;
        const words *unpacked = is_dear ? unpacked_panel(p->linear, panel) : NULL;
        for (; tiles > 0; tiles--) {
            long rows = (end - row + tiles - 1) / tiles;
            panel_tail(bf16, (int)rows, p, panel, row, unpacked,
                       widened ? widened + (row - first_widened) * 2 * p->linear->in_words : NULL);
            row += rows;
        }
    }
    sync_team(worker);
}

/* ---------------------------------------------------------------------------------------------------------- norm */

/* hidden += pending (if given); x = hidden / rms(hidden) * weight. A phase. */
static void add_and_norm(const int bf16, Worker *worker, void *hidden, const void *pending, const void *weight, float eps,
                         void *x, long num_rows, long width) {
    const int size = bf16 ? 2 : 4;
    for (long row; (row = take(worker)) < num_rows;) {
        char *h = (char *)hidden + row * width * size, *to = (char *)x + row * width * size;
        const char *add = pending ? (const char *)pending + row * width * size : NULL;
        floats squares = splat(0.0f);
        for (long i = 0; i < width; i += LANES) {
            floats value = load(bf16, h, i);
            if (add) {
                value += load(bf16, add, i);
                store(bf16, h, i, value);
                if (bf16) value = load(bf16, h, i);
            }
            squares = fused(value, value, squares);
        }
        floats scale = splat(1.0f / sqrtf(add_lanes(squares) / (float)width + eps));
        for (long i = 0; i < width; i += LANES) store(bf16, to, i, load(bf16, h, i) * scale * load(bf16, weight, i));
    }
    sync_team(worker);
}

/* ----------------------------------------------------------------------------------------------------- attention */

#define KEY_TILE 64
#define TILE_VECTORS (KEY_TILE / LANES)
#define QUERY_ROWS (HAS_TILES ? 128 : 64) /* pairs of query and head that go over the keys together */
#define MAX_HEAD_DIM 256

typedef struct {
    int64_t num_sequences, num_tokens, table_width, block_size;
    const int64_t *starts, *counts, *query_starts; /* [sequences], the last [sequences + 1] */
    const int32_t *tables;                         /* [sequences, table_width] */
    const int32_t *blocks;                         /* [tokens]: where each token's keys and values go */
    const int64_t *offsets;
} Batch;

typedef struct {
    char *keys, *values;                /* of block 0 */
    int64_t block_stride, head_stride;  /* in elements */
} Kv;

typedef struct {
    int32_t num_heads, num_kv_heads, head_dim, is_bf16;
    int64_t window; /* 0: none */
    float scale, soft_cap; /* soft_cap 0: none */
} Heads;

/* LANES x LANES words, in place. */
ALWAYS void transpose(words v[LANES]) {
#define LOW(s, l) ((l) & (s) ? LANES + (l) - (s) : (l))
#define HIGH(s, l) ((l) & (s) ? LANES + (l) : (l) + (s))
#if LANES == 16
#define LANES_OF(f, s) \
    (words) { f(s, 0), f(s, 1), f(s, 2), f(s, 3), f(s, 4), f(s, 5), f(s, 6), f(s, 7), f(s, 8), f(s, 9), f(s, 10), \
              f(s, 11), f(s, 12), f(s, 13), f(s, 14), f(s, 15) }
#else
#define LANES_OF(f, s) (words) { f(s, 0), f(s, 1), f(s, 2), f(s, 3), f(s, 4), f(s, 5), f(s, 6), f(s, 7) }
#endif
#define STAGE(s) \
    UNROLL for (int i = 0; i < LANES; i++) \
        if (!(i & (s))) { \
            words a = v[i], b = v[i + (s)]; \
            v[i] = __builtin_shuffle(a, b, LANES_OF(LOW, s)); \
            v[i + (s)] = __builtin_shuffle(a, b, LANES_OF(HIGH, s)); \
        }
#if LANES == 16
    STAGE(8)
#endif
    STAGE(4) STAGE(2) STAGE(1)
#undef STAGE
#undef LANES_OF
#undef LOW
#undef HIGH
}

/* The first of LANES keys, or values, that lie together in a block: block sizes are multiples of LANES. */
ALWAYS const char *rows_of(const int bf16, const Batch *batch, const Kv *kv, const char *first_block, const int32_t *table,
                           long head, long head_dim, long key) {
    long block = key / batch->block_size, offset = key - block * batch->block_size;
    return first_block + ((long)table[block] * kv->block_stride + head * kv->head_stride + offset * head_dim) * (bf16 ? 2 : 4);
}

/* Where a tile's keys, or values, lie: runs of LANES rows, the last of which may have rows that are not used. */
typedef struct {
    const char *runs[TILE_VECTORS];
    long lines; /* of 64 bytes a run */
} Lines;

ALWAYS Lines lines_of(const int bf16, const Batch *batch, const Kv *kv, const char *first_block, const int32_t *table,
                      long head, long head_dim, long first, long context) {
    Lines found = {{NULL}, 0};
    if (first >= context) return found;
    found.lines = LANES * head_dim * (bf16 ? 2 : 4) / 64;
    for (int i = 0; i < TILE_VECTORS; i++) {
        long key = first + i * LANES;
        found.runs[i] = rows_of(bf16, batch, kv, first_block, table, head, head_dim, key < context ? key : first);
    }
    return found;
}

/* Asks for a line of each run: blocks lie far apart, where the processor does not read ahead by itself. */
ALWAYS void fetch(const Lines *lines, long line) {
    if (line < lines->lines)
        UNROLL for (int i = 0; i < TILE_VECTORS; i++) __builtin_prefetch(lines->runs[i] + line * 64, 0, 3);
}

ALWAYS void fetch_all(const Lines *lines) {
    for (long line = 0; line < lines->lines; line++) fetch(lines, line);
}

/* keys [KEY_TILE, head_dim] -> packed [words of head_dim, KEY_TILE], widened if there are no pairs; keys from `valid` on are 0. */
ALWAYS void pack_keys(const int bf16, const Batch *batch, const Kv *kv, const int32_t *table, long head, long head_dim,
                      long first, long valid, words *packed) {
    const long width = head_dim * (bf16 ? 2 : 4) / 4;
    for (long group = 0; group < TILE_VECTORS; group++) {
        long count = valid - group * LANES;
        const char *at = NULL;
        if (count > 0) at = rows_of(bf16, batch, kv, kv->keys, table, head, head_dim, first + group * LANES);
        for (long w = 0; w < width; w += LANES) {
            words v[LANES];
            long missing = width - w < LANES ? width - w : LANES;
            if (count >= LANES && missing == LANES) {
                UNROLL for (int i = 0; i < LANES; i++) v[i] = *(const words_at *)(at + (i * width + w) * 4);
            } else {
                for (int i = 0; i < LANES; i++) {
                    v[i] = (words){0};
                    if (i < count) memcpy(&v[i], at + (i * width + w) * 4, missing * 4);
                }
            }
            transpose(v);
            for (int i = 0; i < missing; i++) {
                if (bf16 && !HAS_PAIRS) {
                    packed[2 * (w + i) * TILE_VECTORS + group] = (words)first_of(v[i]);
                    packed[(2 * (w + i) + 1) * TILE_VECTORS + group] = (words)second_of(v[i]);
                } else {
                    packed[(w + i) * TILE_VECTORS + group] = v[i];
                }
            }
        }
    }
}

/* values [KEY_TILE, head_dim] -> packed [chunks of 64 of head_dim, words of KEY_TILE, 64]; keys from `valid` on are 0.
 * Of pairs, each 32 elements of a head lie there as the even ones, then the odd ones: words need no shuffling so. */
ALWAYS void pack_values(const int bf16, const Batch *batch, const Kv *kv, const int32_t *table, long head, long head_dim,
                        long first, long valid, words *packed) {
    const int pairs = bf16 && HAS_PAIRS;
    const long bytes = head_dim * (bf16 ? 2 : 4), per_word = pairs ? 2 : 1, length = KEY_TILE / per_word;
    static const char zeros[MAX_HEAD_DIM * 4];
    for (long key = 0; key < KEY_TILE; key += LANES) {
        const char *rows = NULL;
        if (key < valid) rows = rows_of(bf16, batch, kv, kv->values, table, head, head_dim, first + key);
        for (long k = 0; k < LANES; k += per_word) {
            const long count = valid - key - k;
            const char *row = count > 0 ? rows + k * bytes : zeros, *next = count > 1 ? row + bytes : zeros;
            words *to = packed + (key + k) / per_word * TILE_VECTORS;
            for (long d = 0; d < head_dim; d += 64, to += length * TILE_VECTORS) {
                const long vectors = head_dim - d < 64 ? (head_dim - d) / LANES : TILE_VECTORS;
                if (!pairs) {
                    for (long v = 0; v < vectors; v++) to[v] = (words)load(bf16, row, d + v * LANES);
                    continue;
                }
                for (long v = 0; v + 1 < vectors; v += 2) {
                    words a = *(const words_at *)(row + (d + v * LANES) * 2), b = *(const words_at *)(next + (d + v * LANES) * 2);
                    to[v] = (a & 0xffff) | b << 16;
                    to[v + 1] = a >> 16 | (b & 0xffff0000u);
                }
                if (vectors % 2) {
                    const long at = (d + (vectors - 1) * LANES) * 2;
                    to[vectors - 1] = __builtin_convertvector(*(const halves_at *)(row + at), words) |
                                      __builtin_convertvector(*(const halves_at *)(next + at), words) << 16;
                }
            }
        }
    }
}

/* acc[rows][TILE_VECTORS] += a [rows, length] words x b [length, KEY_TILE] words; `next`, from a line on, is fetched meanwhile. */
ALWAYS void accumulate(const int pairs, const int rows, const uint32_t *const *a, const words *b, long length,
                       floats acc[GROUP][TILE_VECTORS], const Lines *next, long line) {
    UNROLL for (int column = 0; column < TILE_VECTORS; column += COLUMNS)
        for (long k = 0; k < length; k++) {
            if (column == 0) fetch(next, line + k);
            const words *of_k = b + k * TILE_VECTORS + column;
            if (pairs) {
                UNROLL for (int r = 0; r < rows; r++) {
                    uint32_t word = ((const word_at *)a[r])[k];
                    UNROLL for (int v = 0; v < COLUMNS; v++) acc[r][column + v] = dot(1, acc[r][column + v], of_k[v], word);
                }
                continue;
            }
            floats x[GROUP];
            UNROLL for (int r = 0; r < rows; r++) x[r] = splat(((const float *)a[r])[k]);
            UNROLL for (int v = 0; v < COLUMNS; v++) {
                floats column_of_k = (floats)of_k[v];
                KEEP(column_of_k);
                UNROLL for (int r = 0; r < rows; r++) acc[r][column + v] = fused(x[r], column_of_k, acc[r][column + v]);
            }
        }
}

typedef struct {
    floats sum;     /* of weights, lane by lane */
    float largest;  /* score so far */
    int64_t position;
} Row;

/* Weights of a row's scores with a tile of keys, and how far its `sums` shrink, [vectors] (Milakov and Gimelshein 2018). */
ALWAYS void weigh(const int pairs, const Heads *heads, Row *state, floats scores[TILE_VECTORS], long first, floats *sums,
                  long vectors, void *weights) {
    const ints lanes = LANE_NUMBERS;
    /* in units of ln 2, so that weights are powers of 2 */
    float scale = heads->scale * 1.44269504f, cap = heads->soft_cap;
    UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
        if (cap > 0.0f) {
            floats x = scores[v] * (heads->scale / cap);
            scores[v] = (2.0f * sigmoid(2.0f * x) - 1.0f) * (cap * 1.44269504f);
        } else {
            scores[v] *= scale;
        }
    }
    long newest = state->position - first, oldest = heads->window ? newest - heads->window : -1;
    if (newest < KEY_TILE - 1 || oldest >= 0) {
        UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
            ints key = lanes + v * LANES;
            ints hidden = (key > (int)(newest > KEY_TILE ? KEY_TILE : newest)) |
                          (key <= (int)(oldest < -1 ? -1 : oldest > KEY_TILE ? KEY_TILE : oldest));
            scores[v] = choose(hidden, splat(-INFINITY), scores[v]);
        }
    }
    floats of_lanes = scores[0];
    UNROLL for (int v = 1; v < TILE_VECTORS; v++) of_lanes = larger(of_lanes, scores[v]);
    float best = largest_lane(of_lanes);
    if (best > state->largest) {
        floats shrink = exp2_of(splat(state->largest - best));
        state->sum *= shrink;
        for (long i = 0; i < vectors; i++) sums[i] *= shrink;
        state->largest = best;
    }
    UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
        floats weight = exp2_of(scores[v] - state->largest);
        state->sum += weight;
        store(pairs, weights, v * LANES, weight);
    }
}

/* One tile of keys for up to GROUP rows: scores, weights, and what they make of the values. */
ALWAYS void attend_group(const int pairs, const int rows, const Heads *heads, const uint32_t *const *queries, Row *state,
                         floats *out, const words *keys, const words *values, long first, const Lines *next_keys,
                         const Lines *next_values) {
    const long head_dim = heads->head_dim, per_word = pairs ? 2 : 1, chunks = (head_dim + 63) / 64;
    floats scores[GROUP][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < TILE_VECTORS; v++) scores[r][v] = splat(0.0f);
    accumulate(pairs, rows, queries, keys, head_dim / per_word, scores, next_keys, 0);
    _Alignas(64) char weights[GROUP][KEY_TILE * 4];
    const uint32_t *weight_words[GROUP];
    UNROLL for (int r = 0; r < rows; r++) {
        weigh(pairs, heads, state + r, scores[r], first, out + r * chunks * TILE_VECTORS, chunks * TILE_VECTORS, weights[r]);
        weight_words[r] = (const uint32_t *)weights[r];
    }
    const long length = KEY_TILE / per_word;
    for (long c = 0; c < chunks; c++) {
        floats acc[GROUP][TILE_VECTORS];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < TILE_VECTORS; v++) acc[r][v] = out[(r * chunks + c) * TILE_VECTORS + v];
        accumulate(pairs, rows, weight_words, values + c * length * TILE_VECTORS, length, acc, next_values, c * length);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < TILE_VECTORS; v++) out[(r * chunks + c) * TILE_VECTORS + v] = acc[r][v];
    }
}

#if HAS_TILES
/* sums [TILE rows, 64], `stride` bytes a row, += a [rows, length] words x b [length, 64] words. Registers have as many rows. */
ALWAYS void add_square(const char *a, long a_stride, const words *b, long length, int is_first, char *sums, long stride) {
    const long step = 64 * 4;
    is_written();
#define EACH(f) f(0) f(1) f(2) f(3)
#define ZERO(v) _tile_zero(v);
#define READ(v) _tile_loadd(v, sums + 64 * v, stride);
#define WRITE(v) _tile_stored(v, sums + 64 * v, stride);
    if (is_first) { EACH(ZERO) } else { EACH(READ) }
    for (long k = 0; k < length; k += TILE) {
        const char *weights = (const char *)b + k * step;
        _tile_loadd(4, a + k * 4, a_stride);
        _tile_loadd(6, weights, step);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + 64, step);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, weights + 128, step);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, weights + 192, step);
        _tile_dpbf16ps(3, 4, 7);
    }
    EACH(WRITE)
#undef EACH
#undef ZERO
#undef READ
#undef WRITE
}

/* As `attend_group`, for up to TILE rows of bfloat16: `queries` [rows, head_dim]. */
static void attend_tiled(long rows, const Heads *heads, const char *queries, Row *state, floats *out, const words *keys,
                         const words *values, long first) {
    const long head_dim = heads->head_dim, chunks = (head_dim + 63) / 64, length = KEY_TILE / 2;
    floats scores[TILE][TILE_VECTORS];
    _Alignas(64) char weights[TILE][KEY_TILE * 2];
    add_square(queries, head_dim * 2, keys, head_dim / 2, 1, (char *)scores, sizeof scores[0]);
    for (long r = 0; r < rows; r++)
        weigh(1, heads, state + r, scores[r], first, out + r * chunks * TILE_VECTORS, chunks * TILE_VECTORS, weights[r]);
    for (long c = 0; c < chunks; c++)
        add_square(weights[0], sizeof weights[0], values + c * length * TILE_VECTORS, length, 0,
                   (char *)(out + c * TILE_VECTORS), chunks * 256);
}

static void release_tiles(void) { _tile_release(); }
#else /* never called */
static void shape_tiles(long low, long high) {}
static void attend_tiled(long rows, const Heads *heads, const char *queries, Row *state, floats *out, const words *keys,
                         const words *values, long first) {}
static void release_tiles(void) {}
#endif

/* Queries first_query .. first_query + num_queries - 1 of a sequence, `shared` heads that share a KV head. */
ALWAYS void attend_tile(const int bf16, const Batch *batch, const Kv *kv, const Heads *heads, long sequence, long kv_head,
                        long first_head, long shared, long first_query, long num_queries, const void *queries,
                        long query_stride, void *out, long out_stride) {
    const int pairs = bf16 && HAS_PAIRS;
    const long size = bf16 ? 2 : 4, head_dim = heads->head_dim, chunks = (head_dim + 63) / 64;
    const long num_rows = num_queries * shared;
    const long token = batch->query_starts[sequence] + first_query, position = batch->starts[sequence] + first_query;
    const int32_t *table = batch->tables + sequence * batch->table_width;
    static _Thread_local words keys[MAX_HEAD_DIM * TILE_VECTORS], values[MAX_HEAD_DIM * TILE_VECTORS];
    static _Thread_local floats sums[QUERY_ROWS * MAX_HEAD_DIM / LANES];
    static _Thread_local Row state[QUERY_ROWS];
    static _Thread_local float widened[HAS_PAIRS ? 1 : QUERY_ROWS * MAX_HEAD_DIM];
    const uint32_t *query[QUERY_ROWS];
    static _Thread_local _Alignas(64) char together[HAS_TILES ? QUERY_ROWS * MAX_HEAD_DIM * 2 : 1];
    const int is_tiled = HAS_TILES && bf16 && head_dim % (2 * TILE) == 0 && may_use_tiles;
    long shaped = 0;
    for (long r = 0; r < num_rows; r++) {
        long t = token + r / shared, head = first_head + r % shared;
        const char *from = (const char *)queries + (t * query_stride + head * head_dim) * size;
        if (bf16 && !pairs) {
            float *to = widened + r * head_dim;
            for (long d = 0; d < head_dim; d += LANES) store(0, to, d, load(1, from, d));
            from = (const char *)to;
        }
        if (is_tiled) memcpy(together + r * head_dim * 2, from, head_dim * 2);
        query[r] = (const uint32_t *)from;
        state[r] = (Row){splat(0.0f), -1e30f, position + r / shared};
    }
    memset(sums, 0, num_rows * chunks * TILE_VECTORS * sizeof(floats));
    if (head_dim % 64) memset(values, 0, sizeof values);
    const long last = position + num_queries - 1, context = last + 1;
    long first = heads->window && position - heads->window + 1 > 0 ? position - heads->window + 1 : 0;
    first -= first % KEY_TILE;
    Lines next_keys = lines_of(bf16, batch, kv, kv->keys, table, kv_head, head_dim, first, context);
    Lines next_values = lines_of(bf16, batch, kv, kv->values, table, kv_head, head_dim, first, context);
    fetch_all(&next_keys);
    fetch_all(&next_values);
    for (; first <= last; first += KEY_TILE) {
        long valid = context - first < KEY_TILE ? context - first : KEY_TILE;
        pack_keys(bf16, batch, kv, table, kv_head, head_dim, first, valid, keys);
        pack_values(bf16, batch, kv, table, kv_head, head_dim, first, valid, values);
        next_keys = lines_of(bf16, batch, kv, kv->keys, table, kv_head, head_dim, first + KEY_TILE, context);
        next_values = lines_of(bf16, batch, kv, kv->values, table, kv_head, head_dim, first + KEY_TILE, context);
        if (is_tiled) {
            fetch_all(&next_keys);
            fetch_all(&next_values);
            for (long r = 0; r < num_rows; r += TILE) {
                const long rows = num_rows - r < TILE ? num_rows - r : TILE;
                if (state[r + rows - 1].position < first) continue;
                if (rows != shaped) shape_tiles(rows, rows);
                shaped = rows;
                attend_tiled(rows, heads, together + r * head_dim * 2, state + r, sums + r * chunks * TILE_VECTORS, keys,
                             values, first);
            }
            continue;
        }
        for (long r = 0; r < num_rows; r += GROUP) {
            if (state[r + GROUP < num_rows ? r + GROUP - 1 : num_rows - 1].position < first) continue;
            floats *to = sums + r * chunks * TILE_VECTORS;
#define ROWS_OF(n) attend_group(pairs, n, heads, query + r, state + r, to, keys, values, first, &next_keys, &next_values)
            switch (num_rows - r) {
            case 1: ROWS_OF(1); break;
            case 2: ROWS_OF(2); break;
#if GROUP == 4
            case 3: ROWS_OF(3); break;
#endif
            default: ROWS_OF(GROUP);
            }
#undef ROWS_OF
            next_keys.lines = next_values.lines = 0;
        }
    }
    if (shaped) release_tiles();
    for (long r = 0; r < num_rows; r++) {
        long t = token + r / shared, head = first_head + r % shared;
        floats inverse = splat(1.0f / add_lanes(state[r].sum));
        const floats *sum = sums + r * chunks * TILE_VECTORS;
        const long at = t * out_stride + head * head_dim;
        long d = 0;
        for (; pairs && d + 2 * LANES <= head_dim; d += 2 * LANES) {
            words even = __builtin_convertvector(to_bf16(sum[d / LANES] * inverse), words);
            words odd = __builtin_convertvector(to_bf16(sum[d / LANES + 1] * inverse), words);
            *(words_at *)((uint16_t *)out + at + d) = even | odd << 16;
        }
        for (; d < head_dim; d += LANES) store(bf16, out, at + d, sum[d / LANES] * inverse);
    }
}

/* A phase: `queries` [tokens, heads, head_dim] -> `out`, row strides in elements. */
ALWAYS void attend_as(const int bf16, Worker *worker, const Batch *batch, const Kv *kv, const Heads *heads, const void *queries,
                   long query_stride, void *out, long out_stride) {
    const long shared = heads->num_heads / heads->num_kv_heads, span = shared < QUERY_ROWS ? shared : QUERY_ROWS;
    const long spans = (shared + span - 1) / span, most = QUERY_ROWS / span, heads_of_tile = heads->num_kv_heads * spans;
    long num_pieces = 0, sequence = 0, begin = 0;
    for (long i = 0; i < batch->num_sequences; i++) num_pieces += (batch->counts[i] + most - 1) / most * heads_of_tile;
    for (long piece; (piece = take_near(worker, num_pieces)) < num_pieces;) {
        if (piece < begin) sequence = begin = 0;
        for (long end; piece >= (end = begin + (batch->counts[sequence] + most - 1) / most * heads_of_tile); sequence++)
            begin = end;
        const long index = piece - begin, head = index % heads_of_tile, kv_head = head / spans, skipped = head % spans * span;
        const long query = index / heads_of_tile * most, left = batch->counts[sequence] - query;
        attend_tile(bf16, batch, kv, heads, sequence, kv_head, kv_head * shared + skipped,
                    shared - skipped < span ? shared - skipped : span, query, left < most ? left : most, queries,
                    query_stride, out, out_stride);
    }
    sync_team(worker);
}

/* Asked for twice, so that there is code of its own for each number type. */
static void attend(int bf16, Worker *worker, const Batch *batch, const Kv *kv, const Heads *heads, const void *queries,
                   long query_stride, void *out, long out_stride) {
    if (bf16) attend_as(1, worker, batch, kv, heads, queries, query_stride, out, out_stride);
    else attend_as(0, worker, batch, kv, heads, queries, query_stride, out, out_stride);
}

/* Rotates the first half of a head's first `rotary` elements with the second (GPT-NeoX's order); norms it before, if asked. */
ALWAYS void turn(const int bf16, void *head, long head_dim, const void *norm, float eps, const float *cosines,
                 const float *sines) {
    if (norm) {
        floats squares = splat(0.0f);
        for (long d = 0; d < head_dim; d += LANES) {
            floats value = load(bf16, head, d);
            squares = fused(value, value, squares);
        }
        floats scale = splat(1.0f / sqrtf(add_lanes(squares) / (float)head_dim + eps));
        for (long d = 0; d < head_dim; d += LANES) store(bf16, head, d, load(bf16, head, d) * scale * load(bf16, norm, d));
    }
    const long half = head_dim / 2;
    for (long d = 0; d < half; d += LANES) {
        floats low = load(bf16, head, d), high = load(bf16, head, d + half);
        floats cosine = *(const floats_at *)(cosines + d), sine = *(const floats_at *)(sines + d);
        store(bf16, head, d, fused(low, cosine, -(high * sine)));
        store(bf16, head, d + half, fused(high, cosine, low * sine));
    }
}

ALWAYS void write_token(const int bf16, const Batch *batch, const Kv *kv, const Heads *heads, long token, const char *keys,
                        const char *values) {
    const long size = bf16 ? 2 : 4, bytes = heads->head_dim * size;
    for (long h = 0; h < heads->num_kv_heads; h++) {
        long at = ((long)batch->blocks[token] * kv->block_stride + h * kv->head_stride) * size + batch->offsets[token] * bytes;
        memcpy(kv->keys + at, keys + h * bytes, bytes);
        memcpy(kv->values + at, values + h * bytes, bytes);
    }
}

/* -------------------------------------------------------------------------------------------------------- layers */

typedef struct {
    const void *input_norm, *post_norm;   /* [hidden] */
    const void *query_norm, *key_norm;    /* [head_dim], or NULL */
    Linear qkv, out, gate_up, down;
    int64_t window;
} Layer;

typedef struct {
    const Layer *layers;
    int64_t hidden_size, inner_size;
    int32_t num_heads, num_kv_heads, head_dim, is_bf16, activation;
    float eps;
} Decoder;

typedef struct {
    const Batch *batch;
    const Kv *kv;                   /* by layer */
    void *hidden, *pending;         /* [tokens, hidden_size] */
    const float *cosines, *sines;   /* [tokens, head_dim / 2] */
    void *normed, *heads, *attended, *inner; /* [tokens, ...] to work in */
    int64_t first, last;            /* parts: 2 * layer is its attention, 2 * layer + 1 its MLP */
    int32_t has_pending;
    Ranks *ranks;                   /* each part is summed over them; NULL: one has it all */
    const Changes *changes;         /* of the tokens; NULL: none has any */
} Pass;

typedef struct {
    const Decoder *decoder;
    const Pass *pass;
} PassOfDecoder;

/* What is asked for is read before the first barrier: it may be gone once a member has come to the last one. */
ALWAYS void run_parts(const int bf16, Worker *worker, const Decoder *decoder, const Pass *given) {
    const Pass copied = *given, *pass = &copied;
    const Batch *batch = pass->batch;
    const long size = bf16 ? 2 : 4, tokens = batch->num_tokens, width = decoder->hidden_size, head_dim = decoder->head_dim;
    const long num_heads = decoder->num_heads, num_kv_heads = decoder->num_kv_heads;
    const long heads_width = (num_heads + 2 * num_kv_heads) * head_dim, per_word = bf16 ? 2 : 1;
    for (long part = pass->first; part < pass->last; part++) {
        const Layer *layer = decoder->layers + part / 2;
        const void *pending = part > pass->first || pass->has_pending ? pass->pending : NULL;
        const long change = part / 2 * 4;
        if (part % 2 == 0) {
            const Kv *kv = pass->kv + part / 2;
            const Heads heads = {num_heads, num_kv_heads, head_dim, bf16, layer->window, 1.0f / sqrtf((float)head_dim), 0.0f};
            add_and_norm(bf16, worker, pass->hidden, pending, layer->input_norm, decoder->eps, pass->normed, tokens, width);
            multiply(bf16, worker, &(Product){&layer->qkv, pass->normed, tokens, width / per_word, pass->heads, heads_width, 0, 0,
                                              pass->changes, change});
            for (long t; (t = take(worker)) < tokens;) {
                char *of_token = (char *)pass->heads + t * heads_width * size;
                const float *cosines = pass->cosines + t * (head_dim / 2), *sines = pass->sines + t * (head_dim / 2);
                for (long h = 0; h < num_heads + num_kv_heads; h++)
                    turn(bf16, of_token + h * head_dim * size, head_dim, h < num_heads ? layer->query_norm : layer->key_norm,
                         decoder->eps, cosines, sines);
                const char *keys = of_token + num_heads * head_dim * size;
                write_token(bf16, batch, kv, &heads, t, keys, keys + num_kv_heads * head_dim * size);
            }
            sync_team(worker);
            attend(bf16, worker, batch, kv, &heads, pass->heads, heads_width, pass->attended, num_heads * head_dim);
            multiply(bf16, worker, &(Product){&layer->out, pass->attended, tokens, num_heads * head_dim / per_word, pass->pending,
                                              width, 0, 0, pass->changes, change + 1});
        } else {
            const long inner = decoder->inner_size;
            add_and_norm(bf16, worker, pass->hidden, pending, layer->post_norm, decoder->eps, pass->normed, tokens, width);
            multiply(bf16, worker, &(Product){&layer->gate_up, pass->normed, tokens, width / per_word, pass->inner, inner, 1,
                                              decoder->activation, pass->changes, change + 2});
            multiply(bf16, worker, &(Product){&layer->down, pass->inner, tokens, inner / per_word, pass->pending, width, 0, 0,
                                              pass->changes, change + 3});
        }
        if (pass->ranks) {
            if (worker->thread == 0) sum_over_ranks(bf16, pass->ranks, pass->pending, tokens * width);
            sync_team(worker);
        }
    }
    even_phases(worker);
}

static void pass_member(void *team, int thread, const void *argument) {
    const PassOfDecoder *both = argument;
    Worker worker = {team, 0, thread, 0};
    if (both->decoder->is_bf16) run_parts(1, &worker, both->decoder, both->pass);
    else run_parts(0, &worker, both->decoder, both->pass);
}

void tideway_run_parts(Team *team, const Decoder *decoder, const Pass *pass) {
    run_team(team, pass_member, &(PassOfDecoder){decoder, pass});
}

/* ------------------------------------------------------------------------------------------------- one at a time */

typedef struct {
    Product product;
    int32_t is_bf16;
} LinearCall;

static void run_linear(Worker *worker, const LinearCall *call) {
    if (call->is_bf16) multiply(1, worker, &call->product);
    else multiply(0, worker, &call->product);
}

static void linear_member(void *team, int thread, const void *argument) {
    Worker worker = {team, 0, thread, 0};
    run_linear(&worker, argument);
    even_phases(&worker);
}

void tideway_linear(Team *team, const LinearCall *call) { run_team(team, linear_member, call); }

typedef struct {
    void *hidden;                 /* [rows, width] */
    const void *pending, *weight; /* [rows, width] or NULL; [width] */
    void *out;                    /* [rows, width] */
    int64_t num_rows, width, is_bf16;
    float eps;
} NormCall;

static void run_norm(Worker *worker, const NormCall *c) {
    if (c->is_bf16) add_and_norm(1, worker, c->hidden, c->pending, c->weight, c->eps, c->out, c->num_rows, c->width);
    else add_and_norm(0, worker, c->hidden, c->pending, c->weight, c->eps, c->out, c->num_rows, c->width);
}

static void norm_member(void *team, int thread, const void *argument) {
    Worker worker = {team, 0, thread, 0};
    run_norm(&worker, argument);
    even_phases(&worker);
}

/* Adds what is pending, if it is given, and norms the sum. */
void tideway_norm(Team *team, const NormCall *call) { run_team(team, norm_member, call); }

typedef struct {
    const Batch *batch;
    const Kv *kv;
    const Heads *heads;
    const char *queries, *keys, *values;                  /* [tokens, heads or kv_heads, head_dim] */
    int64_t query_stride, key_stride, value_stride;       /* of tokens, in elements */
    void *out;                                            /* [tokens, heads, head_dim] */
} AttentionCall;

static void attention_member(void *team, int thread, const void *argument) {
    const AttentionCall *call = argument;
    const Heads *heads = call->heads;
    const long out_stride = (long)heads->num_heads * heads->head_dim, size = heads->is_bf16 ? 2 : 4;
    Worker worker = {team, 0, thread, 0};
    if (call->keys) {
        for (long t; (t = take(&worker)) < call->batch->num_tokens;) {
            const char *keys = call->keys + t * call->key_stride * size, *values = call->values + t * call->value_stride * size;
            if (heads->is_bf16) write_token(1, call->batch, call->kv, heads, t, keys, values);
            else write_token(0, call->batch, call->kv, heads, t, keys, values);
        }
        sync_team(&worker);
    }
    if (call->queries) {
        if (heads->is_bf16) attend(1, &worker, call->batch, call->kv, heads, call->queries, call->query_stride, call->out, out_stride);
        else attend(0, &worker, call->batch, call->kv, heads, call->queries, call->query_stride, call->out, out_stride);
    }
    even_phases(&worker);
}

/* Writes keys and values, if given; then attends, if queries are given. */
void tideway_attention(Team *team, const AttentionCall *call) { run_team(team, attention_member, call); }

typedef struct {
    const void *scores; /* [rows, width] */
    int64_t num_rows, width, is_bf16;
    int64_t *best; /* [rows] */
} ArgmaxCall;

#define NO_TOKEN -1 /* of a row with NaN or infinity in it, as in shared/engine/plan.py */

ALWAYS int64_t argmax_of(const int bf16, const void *scores, long row, long width) {
    const char *at = (const char *)scores + row * width * (bf16 ? 2 : 4);
    floats best = splat(-INFINITY);
    ints are_finite = splat(0.0f) == splat(0.0f);
    long whole = width - width % LANES;
    for (long i = 0; i < whole; i += LANES) {
        floats some = load(bf16, at, i);
        are_finite &= some < splat(INFINITY); /* not of NaN */
        best = larger(some, best);
    }
    for (int lane = 0; lane < LANES; lane++)
        if (!are_finite[lane]) return NO_TOKEN;
    float most = largest_lane(best);
    for (long i = whole; i < width; i++) {
        floats one = splat(bf16 ? 0.0f : ((const float *)at)[i]);
        if (bf16) {
            uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16;
            float x;
            memcpy(&x, &bits, 4);
            one = splat(x);
        }
        if (!(one[0] < INFINITY)) return NO_TOKEN;
        most = one[0] > most ? one[0] : most;
    }
    for (long i = 0; i < whole; i += LANES) {
        ints is_best = load(bf16, at, i) == splat(most);
        for (int lane = 0; lane < LANES; lane++)
            if (is_best[lane]) return i + lane;
    }
    for (long i = whole; i < width; i++) {
        uint32_t bits = bf16 ? (uint32_t)((const uint16_t *)at)[i] << 16 : ((const word_at *)at)[i];
        float x;
        memcpy(&x, &bits, 4);
        if (x == most) return i;
    }
    return 0;
}

static void run_argmax(Worker *worker, const ArgmaxCall *c) {
    for (long row; (row = take(worker)) < c->num_rows;)
        c->best[row] = c->is_bf16 ? argmax_of(1, c->scores, row, c->width) : argmax_of(0, c->scores, row, c->width);
    sync_team(worker);
}

static void argmax_member(void *team, int thread, const void *argument) {
    Worker worker = {team, 0, thread, 0};
    run_argmax(&worker, argument);
    even_phases(&worker);
}

/* The first of the largest of each row, or NO_TOKEN. */
void tideway_argmax(Team *team, const ArgmaxCall *call) { run_team(team, argmax_member, call); }

typedef struct {
    NormCall norm;
    LinearCall head;
    ArgmaxCall argmax;
} MostLikelyCall;

static void most_likely_member(void *team, int thread, const void *argument) {
    const MostLikelyCall call = *(const MostLikelyCall *)argument;
    Worker worker = {team, 0, thread, 0};
    run_norm(&worker, &call.norm);
    run_linear(&worker, &call.head);
    run_argmax(&worker, &call.argmax);
    even_phases(&worker);
}

/* What follows the last layer of greedy decoding. */
void tideway_most_likely(Team *team, const MostLikelyCall *call) { run_team(team, most_likely_member, call); }

typedef struct {
    void *scores; /* [rows, width] */
    int64_t num_rows, width, is_bf16;
    const uint32_t *allowed; /* [rows, (width + 31) / 32]: bit t % 32 of word t / 32 says whether t stays */
} MaskCall;

ALWAYS void mask_row(const int bf16, const MaskCall *call, long row) {
    const long size = bf16 ? 2 : 4;
    char *scores = (char *)call->scores + row * call->width * size;
    const uint32_t *allowed = call->allowed + row * ((call->width + 31) / 32);
    const words lanes = LANE_NUMBERS;
    for (long i = 0; i < call->width; i += LANES) {
        const uint32_t bits = allowed[i / 32] >> i % 32;
        const long left = call->width - i;
        const uint32_t all = (1u << LANES) - 1;
        if ((bits & all) == all) continue;
        char some[64] = {0};
        if (left < LANES) memcpy(some, scores + i * size, left * size);
        floats score = left < LANES ? load(bf16, some, 0) : load(bf16, scores, i);
        store_some(bf16, scores, i, choose(-(ints)((bits >> lanes) & 1), score, splat(-INFINITY)), left);
    }
}

static void mask_member(void *team, int thread, const void *argument) {
    const MaskCall *call = argument;
    Worker worker = {team, 0, thread, 0};
    for (long row; (row = take(&worker)) < call->num_rows;) {
        if (call->is_bf16) mask_row(1, call, row);
        else mask_row(0, call, row);
    }
    sync_team(&worker);
    even_phases(&worker);
}

/* What is not allowed becomes -infinity. */
void tideway_mask(Team *team, const MaskCall *call) { run_team(team, mask_member, call); }
