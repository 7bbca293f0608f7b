// The state of a block pool, as flat arrays, and the operations on one block or one request.
// What it does for each block is what blockyard.core does; what it leaves out is every check of its input.
#ifndef BLOCKYARD_LIMIT_POOL_H
#define BLOCKYARD_LIMIT_POOL_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_TOKENS = 16, BLOCK_WORDS = 8, TILE_BLOCKS = 64, ID_BITS = 27, TAG_BITS = 35 };
#define ID_MASK ((1ull << ID_BITS) - 1)
#define HASH_MASK ((1ull << 62) - 1)

typedef struct {
    uint64_t own, parent;  // 0: not in the index; never used twice
} Identity;

// Where the free blocks of a pool lie: in a random order, or as after a life in which chains are taken and freed whole.
typedef enum { SHUFFLED, IN_ORDER } Layout;

typedef struct {
    Layout layout;
    uint32_t num_blocks, num_free;
    uint64_t slot_mask, last_identity;
    int home_shift;
    uint64_t *slots;               // tag << ID_BITS | block, 0: empty
    uint64_t (*words)[BLOCK_WORDS];  // the tokens of each block, one cache line
    Identity *identity;              // one more than there are blocks, so that each has a neighbour on both sides
    uint64_t *hash;                  // of blocks in the table; 0: a run's other blocks, which only their neighbour leads to
    int32_t *ref_cnt, *next, *prev;  // block 0 is the head of the free queue
    uint64_t keys[BLOCK_WORDS];
} Pool;

static uint64_t random_state = 88172645463325252ull;

// Xorshift (Marsaglia 2003).
static inline uint64_t random_word(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static inline void *lines(size_t bytes) {
    size_t rounded = (bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, rounded);
    if (memory == NULL) abort();
    return memset(memory, 0, rounded);
}

static inline void append_free(Pool *pool, int32_t block) {
    int32_t last = pool->prev[0];
    pool->next[last] = block;
    pool->prev[block] = last;
    pool->next[block] = 0;
    pool->prev[0] = block;
    pool->num_free++;
}

static inline void unlink_free(Pool *pool, int32_t block) {
    int32_t before = pool->prev[block], after = pool->next[block];
    pool->next[before] = after;
    pool->prev[after] = before;
    pool->num_free--;
}

static Pool *new_pool(uint32_t num_blocks, Layout layout) {
    Pool *pool = lines(sizeof(Pool));
    pool->layout = layout;
    pool->num_blocks = num_blocks;
    int bits = 1;
    while (1ull << bits < 2ull * num_blocks) bits++;
    pool->slot_mask = (1ull << bits) - 1;
    pool->home_shift = TAG_BITS - bits;
    pool->slots = lines(sizeof(uint64_t) << bits);
    pool->words = lines((size_t)(num_blocks + 1) * sizeof *pool->words);
    pool->identity = lines((size_t)(num_blocks + 1) * sizeof(Identity));
    pool->hash = lines((size_t)num_blocks * sizeof(uint64_t));
    pool->ref_cnt = lines((size_t)num_blocks * sizeof(int32_t));
    pool->next = lines((size_t)num_blocks * sizeof(int32_t));
    pool->prev = lines((size_t)num_blocks * sizeof(int32_t));
    pool->last_identity = 1;  // the root
    for (int word = 0; word < BLOCK_WORDS; word++) pool->keys[word] = random_word() | 1;
    int32_t *order = lines(num_blocks * sizeof *order);
    for (uint32_t i = 1; i < num_blocks; i++) order[i] = (int32_t)i;
    for (uint32_t i = num_blocks - 1; layout == SHUFFLED && i > 1; i--) {
        uint32_t other = 1 + (uint32_t)(random_word() % i);
        int32_t kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
    for (uint32_t i = 1; i < num_blocks; i++) append_free(pool, order[i]);
    free(order);
    return pool;
}

static void drop_pool(Pool *pool) {
    void *parts[] = {pool->slots, pool->words, pool->identity, pool->hash, pool->ref_cnt, pool->next, pool->prev};
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) free(parts[part]);
    free(pool);
}

// The multilinear hash of a block (Lemire and Kaser 2014), chained to the hash of the block before.
static inline uint64_t chain(const Pool *pool, const uint64_t *words, uint64_t before) {
    uint64_t total = before;
    for (int word = 0; word < BLOCK_WORDS; word++) total += words[word] * pool->keys[word];
    total &= HASH_MASK;
    return ((total ^ (total >> 32)) * 2971215073198273613ull) & HASH_MASK;
}

static inline uint64_t home_of(const Pool *pool, uint64_t hash) { return hash >> ID_BITS >> pool->home_shift; }

static inline int is_equal(const Pool *pool, const uint64_t *words, uint32_t block, uint64_t parent) {
    uint64_t difference = pool->identity[block].parent ^ parent;
    for (int word = 0; word < BLOCK_WORDS; word++) difference |= pool->words[block][word] ^ words[word];
    return difference == 0;
}

// The block with these words under this parent, or 0.
static inline uint32_t find(const Pool *pool, const uint64_t *words, uint64_t hash, uint64_t parent) {
    for (uint64_t place = home_of(pool, hash);; place = (place + 1) & pool->slot_mask) {
        uint64_t slot = pool->slots[place];
        if (slot == 0) return 0;
        if (slot >> ID_BITS == hash >> ID_BITS && is_equal(pool, words, (uint32_t)(slot & ID_MASK), parent))
            return (uint32_t)(slot & ID_MASK);
    }
}

static inline void hash_tile(const Pool *pool, const uint64_t *words, uint64_t *hashes, int count, uint64_t before) {
    for (int i = 0; i < count; i++) {
        before = chain(pool, words + i * BLOCK_WORDS, before);
        hashes[i] = before;
        __builtin_prefetch(&pool->slots[home_of(pool, before)]);
    }
}

// How many of the first `count` blocks of a prompt are cached; their ids go to `found`. Tiles, so that loads overlap.
static int look_up_tiles(const Pool *pool, const uint64_t *words, int count, int32_t *found) {
    uint64_t hashes[TILE_BLOCKS], before = 1, parent = 1;
    for (int first = 0; first < count; first += TILE_BLOCKS) {
        int tile = count - first < TILE_BLOCKS ? count - first : TILE_BLOCKS;
        const uint64_t *start = words + (size_t)first * BLOCK_WORDS;
        hash_tile(pool, start, hashes, tile, before);
        for (int i = 0; i < tile; i++) {
            uint32_t guess = (uint32_t)(pool->slots[home_of(pool, hashes[i])] & ID_MASK);
            __builtin_prefetch(&pool->words[guess]);
            __builtin_prefetch(&pool->identity[guess]);
        }
        for (int i = 0; i < tile; i++) {
            uint32_t block = find(pool, start + i * BLOCK_WORDS, hashes[i], parent);
            if (block == 0) return first + i;
            parent = pool->identity[block].own;
            found[first + i] = (int32_t)block;
        }
        before = hashes[tile - 1];
    }
    return count;
}

// The same where blocks lie in runs: the table leads to the first block of each, and every other is its neighbour's.
static int look_up_runs(const Pool *pool, const uint64_t *words, int count, int32_t *found) {
    uint64_t parent = 1;
    int i = 0;
    while (i < count) {
        uint32_t block = find(pool, words + i * BLOCK_WORDS, chain(pool, words + i * BLOCK_WORDS, parent), parent);
        if (block == 0) return i;
        uint32_t step = pool->identity[block + 1].parent == pool->identity[block].own ? 1 : -1u;
        do {
            found[i++] = (int32_t)block;
            parent = pool->identity[block].own;
            block += step;
        } while (i < count && is_equal(pool, words + i * BLOCK_WORDS, block, parent));
    }
    return count;
}

static int look_up(const Pool *pool, const uint64_t *words, int count, int32_t *found) {
    return (pool->layout == SHUFFLED ? look_up_tiles : look_up_runs)(pool, words, count, found);
}

// Take a block out of the table; the slots behind it move up (Knuth, volume 3, 6.4 R).
static inline void unlist(Pool *pool, int32_t block) {
    uint64_t gap = home_of(pool, pool->hash[block]);
    while ((pool->slots[gap] & ID_MASK) != (uint64_t)block) gap = (gap + 1) & pool->slot_mask;
    for (uint64_t place = (gap + 1) & pool->slot_mask; pool->slots[place] != 0; place = (place + 1) & pool->slot_mask) {
        uint64_t home = pool->slots[place] >> ID_BITS >> pool->home_shift;
        if (((place - home) & pool->slot_mask) >= ((place - gap) & pool->slot_mask)) {
            pool->slots[gap] = pool->slots[place];
            gap = place;
        }
    }
    pool->slots[gap] = 0;
    pool->hash[block] = 0;
}

static inline void evict(Pool *pool, int32_t block) {
    if (pool->hash[block] != 0) unlist(pool, block);
    pool->identity[block] = (Identity){0, 0};
}

// `count` blocks from the head of the queue; what they cached is forgotten, in a pass after the one that loads it.
static void allocate(Pool *pool, int32_t *blocks, int count) {
    if (pool->num_free < (uint32_t)count) abort();
    for (int i = 0; i < count; i++) {
        int32_t block = pool->next[0];
        unlink_free(pool, block);
        pool->ref_cnt[block] = 1;
        blocks[i] = block;
        __builtin_prefetch(&pool->identity[block]);
        __builtin_prefetch(&pool->hash[block]);
        __builtin_prefetch(&pool->words[block], 1);
    }
    for (int i = 0; i < count; i++)
        if (pool->hash[blocks[i]] != 0)
            __builtin_prefetch(&pool->slots[home_of(pool, pool->hash[blocks[i]])], 1);
    for (int i = 0; i < count; i++)
        if (pool->identity[blocks[i]].own != 0) evict(pool, blocks[i]);
}

// Index one block, whose tokens are in its row; equal content under an equal parent keeps its first block.
static inline uint64_t publish_block(Pool *pool, int32_t block, uint64_t hash, uint64_t parent) {
    uint64_t place = home_of(pool, hash);
    for (; pool->slots[place] != 0; place = (place + 1) & pool->slot_mask) {
        uint32_t other = (uint32_t)(pool->slots[place] & ID_MASK);
        if (pool->slots[place] >> ID_BITS == hash >> ID_BITS && is_equal(pool, pool->words[block], other, parent))
            return pool->identity[other].own;
    }
    pool->slots[place] = (hash >> ID_BITS) << ID_BITS | (uint64_t)block;
    pool->identity[block] = (Identity){++pool->last_identity, parent};
    pool->hash[block] = hash;
    return pool->last_identity;
}

static void publish_tiles(Pool *pool, const uint64_t *words, const int32_t *blocks, int count) {
    uint64_t hashes[TILE_BLOCKS], before = 1, parent = 1;
    for (int first = 0; first < count; first += TILE_BLOCKS) {
        int tile = count - first < TILE_BLOCKS ? count - first : TILE_BLOCKS;
        const uint64_t *start = words + (size_t)first * BLOCK_WORDS;
        hash_tile(pool, start, hashes, tile, before);
        for (int i = 0; i < tile; i++)
            memcpy(pool->words[blocks[first + i]], start + i * BLOCK_WORDS, sizeof *pool->words);
        for (int i = 0; i < tile; i++) parent = publish_block(pool, blocks[first + i], hashes[i], parent);
        before = hashes[tile - 1];
    }
}

// The first block of each run is searched for and gets a slot; after a content that is new, no equal block can exist.
// Prompts are published once: a second one would have to look at the neighbours too.
static void publish_runs(Pool *pool, const uint64_t *words, const int32_t *blocks, int count) {
    uint64_t parent = 1;
    for (int i = 0; i < count; i++) {
        int32_t step = i > 0 ? blocks[i] - blocks[i - 1] : 0;
        int is_new = parent == pool->last_identity && parent != 1;
        memcpy(pool->words[blocks[i]], words + i * BLOCK_WORDS, sizeof *pool->words);
        if (is_new && (step == 1 || step == -1)) {
            pool->identity[blocks[i]] = (Identity){++pool->last_identity, parent};
            parent = pool->last_identity;
        } else {
            parent = publish_block(pool, blocks[i], chain(pool, words + i * BLOCK_WORDS, parent), parent);
        }
    }
}

static void publish(Pool *pool, const uint64_t *words, const int32_t *blocks, int count) {
    (pool->layout == SHUFFLED ? publish_tiles : publish_runs)(pool, words, blocks, count);
}

// Give blocks back, the last one first, so that a suffix is evicted before its prefix.
static void release(Pool *pool, const int32_t *blocks, int count) {
    for (int i = count - 1; i >= 0; i--)
        if (--pool->ref_cnt[blocks[i]] == 0) append_free(pool, blocks[i]);
}

// Hold cached blocks once more; the idle ones leave the queue.
static void touch(Pool *pool, const int32_t *blocks, int count) {
    for (int i = 0; i < count; i++)
        if (pool->ref_cnt[blocks[i]]++ == 0) unlink_free(pool, blocks[i]);
}

#endif
