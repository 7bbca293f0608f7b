// What the loops of a block manager cost in C: prints a JSON array of rows.
// usage: limit shuffled|in-order NUM_BLOCKS...
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <time.h>

#include "pool.h"

enum { PROMPT_BLOCKS = 750, ROUNDS = 7, PROMPT_SAMPLES = 200, PROMPTS_AT_MOST = 400, NUM_SEQS = 1024, SEQ_TOKENS = 512 };
enum { TABLE_WIDTH = 512, STEPS_A_ROUND = 16, DECODE_ROUNDS = 20, LEAVES_A_ROUND = 2000 };

static const char *separator = "";
static volatile uint64_t sink;  // results go here, so that no loop is dropped

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void print_row(const char *name, uint32_t size, double *samples, int count) {
    qsort(samples, (size_t)count, sizeof *samples, compare);
    printf("%s{\"name\": \"%s\", \"size\": %u, \"value\": %.3f, \"low\": %.3f, \"high\": %.3f}", separator, name, size,
           samples[count / 2], samples[0], samples[count - 1]);
    separator = ",\n ";
    fflush(stdout);
}

static uint64_t random_block_word(void) { return random_word() % 128000 | (random_word() % 128000) << 32; }

static uint64_t *new_prompts(uint32_t count) {
    size_t words = (size_t)count * PROMPT_BLOCKS * BLOCK_WORDS;
    uint64_t *prompts = lines(words * sizeof *prompts);
    for (size_t i = 0; i < words; i++) prompts[i] = random_block_word();
    return prompts;
}

static const uint64_t *prompt(const uint64_t *prompts, uint32_t index) {
    return prompts + (size_t)index * PROMPT_BLOCKS * BLOCK_WORDS;
}

// Allocate and publish `count` prompts, free them all; either time may be asked for.
static void fill(Pool *pool, const uint64_t *prompts, uint32_t count, double *publish_ns, double *free_ns) {
    int32_t *blocks = lines((size_t)count * PROMPT_BLOCKS * sizeof *blocks);
    double start = now_ns();
    for (uint32_t i = 0; i < count; i++) {
        allocate(pool, blocks + (size_t)i * PROMPT_BLOCKS, PROMPT_BLOCKS);
        publish(pool, prompt(prompts, i), blocks + (size_t)i * PROMPT_BLOCKS, PROMPT_BLOCKS);
    }
    double middle = now_ns();
    for (uint32_t i = 0; i < count; i++) release(pool, blocks + (size_t)i * PROMPT_BLOCKS, PROMPT_BLOCKS);
    double items = (double)count * PROMPT_BLOCKS;
    if (publish_ns) *publish_ns = (middle - start) / items;
    if (free_ns) *free_ns = (now_ns() - middle) / items;
    free(blocks);
}

static void measure_look_up(uint32_t size, Layout layout) {
    uint32_t count = (size - 1) / PROMPT_BLOCKS;
    uint64_t *prompts = new_prompts(count);
    Pool *pool = new_pool(size, layout);
    fill(pool, prompts, count, NULL, NULL);
    double asked[ROUNDS], leased[ROUNDS];
    int32_t found[PROMPT_BLOCKS];
    for (int round = -1; round < ROUNDS; round++) {  // the first one does not count
        for (int leases = 0; leases < 2; leases++) {
            double start = now_ns();
            for (int sample = 0; sample < PROMPT_SAMPLES; sample++) {
                const uint64_t *words = prompt(prompts, (uint32_t)(random_word() % count));
                if (look_up(pool, words, PROMPT_BLOCKS, found) != PROMPT_BLOCKS) abort();
                if (leases) touch(pool, found, PROMPT_BLOCKS), release(pool, found, PROMPT_BLOCKS);
                sink += (uint64_t)found[PROMPT_BLOCKS - 1];
            }
            if (round >= 0) (leases ? leased : asked)[round] = (now_ns() - start) / PROMPT_SAMPLES / PROMPT_BLOCKS;
        }
    }
    print_row("lookup", size, asked, ROUNDS);
    print_row("lookup + lease + release", size, leased, ROUNDS);
    drop_pool(pool);
    free(prompts);
}

static void measure_life(uint32_t size, Layout layout) {
    uint32_t count = (size - 1) / PROMPT_BLOCKS;
    uint32_t timed = count < PROMPTS_AT_MOST ? count : PROMPTS_AT_MOST;
    uint64_t *prompts = new_prompts(timed), *others = new_prompts(timed), *filling = new_prompts(count);
    double published[ROUNDS], freed[2 * ROUNDS], evicting[ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        Pool *pool = new_pool(size, layout);
        fill(pool, prompts, timed, &published[round], &freed[2 * round]);
        if (timed < count) fill(pool, filling, count, NULL, NULL);
        fill(pool, others, timed, &evicting[round], &freed[2 * round + 1]);
        drop_pool(pool);
    }
    print_row("allocate + publish", size, published, ROUNDS);
    print_row("allocate + publish, evicting", size, evicting, ROUNDS);
    print_row("free", size, freed, 2 * ROUNDS);
    free(prompts), free(others), free(filling);
}

// A pool full of prompts of one block each: every block is a leaf of the tree of prefixes.
static void measure_leaves(uint32_t size) {
    Pool *pool = new_pool(size, SHUFFLED);
    double samples[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) {
        uint32_t count = round < 0 ? size - 1 : LEAVES_A_ROUND;
        uint64_t *words = lines((size_t)count * sizeof *pool->words);
        for (size_t i = 0; i < (size_t)count * BLOCK_WORDS; i++) words[i] = random_block_word();
        double start = now_ns();
        for (uint32_t i = 0; i < count; i++) {
            int32_t block;
            allocate(pool, &block, 1);
            publish(pool, words + (size_t)i * BLOCK_WORDS, &block, 1);
            release(pool, &block, 1);
        }
        if (round >= 0) samples[round] = (now_ns() - start) / count;
        free(words);
    }
    print_row("one block, evicting a leaf", size, samples, ROUNDS);
    drop_pool(pool);
}

typedef struct {
    int32_t rows[NUM_SEQS][TABLE_WIDTH];
    int64_t slots[NUM_SEQS];
    int32_t length[NUM_SEQS];
    uint64_t parent[NUM_SEQS], chain_hash[NUM_SEQS];
} Batch;

// Slots and table rows for one more token of every sequence.
static void reserve(Pool *pool, Batch *batch) {
    for (int seq = 0; seq < NUM_SEQS; seq++) {
        int32_t logical = batch->length[seq] / BLOCK_TOKENS, offset = batch->length[seq] % BLOCK_TOKENS;
        if (offset == 0) allocate(pool, &batch->rows[seq][logical], 1);
        batch->slots[seq] = (int64_t)batch->rows[seq][logical] * BLOCK_TOKENS + offset;
    }
}

// The sampled tokens go to their blocks; a block that is full now is published.
static void commit(Pool *pool, Batch *batch, const int32_t *sampled) {
    for (int seq = 0; seq < NUM_SEQS; seq++) {
        int32_t *tokens = (int32_t *)pool->words, length = batch->length[seq]++;
        tokens[batch->slots[seq]] = sampled[seq];
        if (length % BLOCK_TOKENS != BLOCK_TOKENS - 1) continue;
        int32_t block = batch->rows[seq][length / BLOCK_TOKENS];
        batch->chain_hash[seq] = chain(pool, pool->words[block], batch->chain_hash[seq]);
        batch->parent[seq] = publish_block(pool, block, batch->chain_hash[seq], batch->parent[seq]);
    }
}

static void measure_decode(void) {
    Pool *pool = new_pool(2 * NUM_SEQS * SEQ_TOKENS / BLOCK_TOKENS, SHUFFLED);
    Batch *batch = lines(sizeof *batch);
    int32_t sampled[NUM_SEQS];
    for (int seq = 0; seq < NUM_SEQS; seq++) batch->parent[seq] = batch->chain_hash[seq] = 1;
    double samples[DECODE_ROUNDS];
    for (int step = -SEQ_TOKENS; step < DECODE_ROUNDS * STEPS_A_ROUND; step++) {
        for (int seq = 0; seq < NUM_SEQS; seq++) sampled[seq] = (int32_t)(random_word() % 128000);
        double start = now_ns();
        reserve(pool, batch);
        commit(pool, batch, sampled);
        double spent = now_ns() - start;
        if (step < 0) continue;
        if (step % STEPS_A_ROUND == 0) samples[step / STEPS_A_ROUND] = 0;
        samples[step / STEPS_A_ROUND] += spent / STEPS_A_ROUND;
        sink += (uint64_t)batch->slots[NUM_SEQS - 1];
    }
    print_row("decode step", NUM_SEQS, samples, DECODE_ROUNDS);
    drop_pool(pool);
    free(batch);
}

int main(int count, char **arguments) {
    if (count < 2) return 2;
    Layout layout = strcmp(arguments[1], "in-order") ? SHUFFLED : IN_ORDER;
    printf("[");
    for (int i = 2; i < count; i++) {
        uint32_t size = (uint32_t)strtoul(arguments[i], NULL, 10);
        if (size <= PROMPT_BLOCKS || size > ID_MASK) return 2;
        measure_look_up(size, layout);
        measure_life(size, layout);
        if (layout == SHUFFLED && size <= 100000) measure_leaves(size);
    }
    if (layout == SHUFFLED) measure_decode();
    printf("]\n");
    return 0;
}
