/* The two checksums of the format: SHA-256, which names a file and covers its code, and XXH64 of XXH64s for weights,
   which is as quick as memory. Both are read with memcpy: no alignment is assumed. */
#include "internal.h"

static uint64_t rotated(uint64_t x, int by) { return x << by | x >> (64 - by); }
static uint32_t rotated32(uint32_t x, int by) { return x >> by | x << (32 - by); }

/* ---- XXH64, with seed 0 ---- */

#define P1 UINT64_C(0x9E3779B185EBCA87)
#define P2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define P3 UINT64_C(0x165667B19E3779F9)
#define P4 UINT64_C(0x85EBCA77C2B2AE63)
#define P5 UINT64_C(0x27D4EB2F165667C5)

static uint64_t read64(const uint8_t* at) {
  uint64_t x;
  memcpy(&x, at, 8);
  return x;
}
static uint64_t mixed(uint64_t sum, uint64_t x) { return rotated(sum + x * P2, 31) * P1; }
static uint64_t merged(uint64_t hash, uint64_t sum) { return (hash ^ mixed(0, sum)) * P1 + P4; }

static uint64_t xxh64(const uint8_t* at, size_t size) {
  const uint8_t* end = at + size;
  uint64_t hash;
  if (size >= 32) {
    uint64_t a = P1 + P2, b = P2, c = 0, d = 0 - P1;
    for (; end - at >= 32; at += 32) {
      a = mixed(a, read64(at)), b = mixed(b, read64(at + 8));
      c = mixed(c, read64(at + 16)), d = mixed(d, read64(at + 24));
    }
    hash = rotated(a, 1) + rotated(b, 7) + rotated(c, 12) + rotated(d, 18);
    hash = merged(merged(merged(merged(hash, a), b), c), d);
  } else {
    hash = P5;
  }
  hash += size;
  for (; end - at >= 8; at += 8) hash = rotated(hash ^ mixed(0, read64(at)), 27) * P1 + P4;
  if (end - at >= 4) {
    uint32_t x;
    memcpy(&x, at, 4);
    hash = rotated(hash ^ x * P1, 23) * P2 + P3;
    at += 4;
  }
  for (; at < end; ++at) hash = rotated(hash ^ *at * P5, 11) * P1;
  hash = (hash ^ hash >> 33) * P2;
  hash = (hash ^ hash >> 29) * P3;
  return hash ^ hash >> 32;
}

/* ---- blocks of 1 MiB, hashed by all threads ---- */

#define BLOCK ((size_t)1 << 20)

typedef struct {
  const uint8_t* data;
  size_t size, count;
  uint64_t* hashes;
} blocks;

static void hash_part(void* given) {
  const blocks* b = given;
  size_t member = (size_t)fl_member(), members = (size_t)fl_members();
  for (size_t k = member; k < b->count; k += members) {
    size_t left = b->size - k * BLOCK;
    b->hashes[k] = xxh64(b->data + k * BLOCK, left < BLOCK ? left : BLOCK);
  }
}

uint64_t flam_hash(const void* data, size_t size) {
  size_t count = size / BLOCK + (size % BLOCK != 0);
  uint64_t few[8], *hashes = count <= 8 ? few : malloc(count * sizeof(uint64_t));
  if (!hashes) return ~xxh64(data, size); /* no memory: returns a wrong value, so that the file is refused */
  blocks b = {data, size, count, hashes};
  if (count > 8) fl_parallel(hash_part, &b, 0);
  else fl_parallel(hash_part, &b, 1);
  uint64_t hash = xxh64((const uint8_t*)hashes, count * sizeof(uint64_t));
  if (hashes != few) free(hashes);
  return hash;
}

/* ---- SHA-256 ---- */

/* The fractional parts of the cube roots of the first 64 primes. */
static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static void sha_block(uint32_t h[8], const uint8_t* at) {
  uint32_t w[64], v[8];
  for (int i = 0; i < 16; ++i) {
    const uint8_t* b = at + 4 * i;
    w[i] = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
  }
  for (int i = 16; i < 64; ++i) {
    uint32_t x = w[i - 15], y = w[i - 2];
    w[i] = w[i - 16] + (rotated32(x, 7) ^ rotated32(x, 18) ^ x >> 3) + w[i - 7] + (rotated32(y, 17) ^ rotated32(y, 19) ^ y >> 10);
  }
  memcpy(v, h, sizeof v);
  for (int i = 0; i < 64; ++i) {
    uint32_t e = v[4], a = v[0];
    uint32_t t = v[7] + (rotated32(e, 6) ^ rotated32(e, 11) ^ rotated32(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + K[i] + w[i];
    uint32_t u = (rotated32(a, 2) ^ rotated32(a, 13) ^ rotated32(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
    memmove(v + 1, v, 7 * sizeof *v);
    v[4] += t;
    v[0] = t + u;
  }
  for (int i = 0; i < 8; ++i) h[i] += v[i];
}

void fl_sha256(const void* data, size_t size, uint8_t out[32]) {
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint8_t* at = data;
  size_t left = size;
  for (; left >= 64; left -= 64, at += 64) sha_block(h, at);
  uint8_t last[128] = {0};
  if (left) memcpy(last, at, left);
  last[left] = 0x80;
  size_t end = left < 56 ? 64 : 128;
  for (int i = 0; i < 8; ++i) last[end - 1 - i] = (uint8_t)((uint64_t)size * 8 >> 8 * i);
  for (size_t k = 0; k < end; k += 64) sha_block(h, last + k);
  for (int i = 0; i < 32; ++i) out[i] = (uint8_t)(h[i / 4] >> (24 - 8 * (i % 4)));
}
