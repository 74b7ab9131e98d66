/* Threads that load, run and swap weights at once, and every kind of damage: run by tests under sanitizers.

     stress threads model.flam 64 10000      the model is y = hardswish(x) * weight, of 64 numbers
     stress damage model.flam 10000 SEED */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "flambeau.h"

#ifndef N
#define N 64
#endif
static flam_model* shared;
static const char* path;
static int calls;
static _Atomic int wrong, stop;

/* All weights are one number at any time, so all results of a call must have the same factor. */
static void* run(void* given) {
  float x[N], y[N];
  for (int k = 0; k < N; ++k) x[k] = 4;
  flam_tensor in = {x, FLAM_FLOAT32, 1, {N}, {1}}, out = {y, FLAM_FLOAT32, 1, {N}, {1}};
  for (int i = 0; i < calls; ++i) {
    flam_error error = {0};
    flam_model* m = shared;
    if (i % 50 == 0 && given) m = flam_load(path, NULL, &error);
    if (!m || flam_run(m, 0, &in, 1, &out, 1, &error)) {
      atomic_fetch_add(&wrong, 1);
      continue;
    }
    for (int k = 1; k < N; ++k) {
      if (y[k] != y[0] || y[0] != (float)(int)y[0]) {
        atomic_fetch_add(&wrong, 1);
        break;
      }
    }
    if (m != shared) flam_unload(m);
  }
  return NULL;
}

static void* swap(void* unused) {
  (void)unused;
  const char* name = "weight";
  for (int round = 1; !atomic_load(&stop); ++round) {
    float w[N];
    for (int k = 0; k < N; ++k) w[k] = (float)(1 + round % 7);
    flam_tensor t = {w, FLAM_FLOAT32, 1, {N}, {1}};
    flam_error error = {0};
    if (flam_update_weights(shared, &name, &t, 1, &error)) atomic_fetch_add(&wrong, 1);
  }
  return NULL;
}

static int threads(int count, int all) {
  flam_error error = {0};
  flam_set_threads(4);
  shared = flam_load(path, NULL, &error);
  if (!shared) return fprintf(stderr, "%s\n", error.message), 1;
  calls = all / count > 0 ? all / count : 1;
  pthread_t* ids = malloc(sizeof *ids * (size_t)(count + 1));
  pthread_create(ids + count, NULL, swap, NULL);
  for (int k = 0; k < count; ++k) pthread_create(ids + k, NULL, run, (void*)(intptr_t)(k % 2));
  for (int k = 0; k < count; ++k) pthread_join(ids[k], NULL);
  atomic_store(&stop, 1);
  pthread_join(ids[count], NULL);
  free(ids);
  flam_unload(shared);
  printf("%d calls, %d wrong\n", calls * count, wrong);
  return wrong != 0;
}

/* ---- damage ---- */

static uint64_t state;
static uint64_t draw(void) {
  state += 0x9E3779B97F4A7C15ULL;
  uint64_t x = state;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ x >> 27) * 0x94D049BB133111EBULL;
  return x ^ x >> 31;
}

void fl_sha256(const void* data, size_t size, uint8_t out[32]);

/* A forger knows the checksums: they are made right again, so that what is inside is looked at. */
static void seal(uint8_t* data, size_t size) {
  uint64_t sections, all = size;
  memcpy(data + 16, &all, 8);
  memcpy(&sections, data + 24, 8);
  if (sections > 16) return;
  for (uint64_t k = 0; k < sections; ++k) {
    uint8_t* s = data + 128 + 128 * k;
    uint64_t offset, length, hash;
    memcpy(&offset, s + 8, 8);
    memcpy(&length, s + 16, 8);
    if (offset > size || length > size - offset) continue;
    hash = flam_hash(data + offset, length);
    memcpy(s + 24, &hash, 8);
    fl_sha256(data + offset, length, s + 32);
  }
  uint8_t both[64];
  fl_sha256(data, 64, both);
  fl_sha256(data + 128, sections * 128, both + 32);
  fl_sha256(both, 64, data + 64);
}

static int damage(int count) {
  int file = open(path, O_RDONLY);
  struct stat status;
  if (file < 0 || fstat(file, &status)) return 1;
  size_t size = (size_t)status.st_size;
  uint8_t* whole = malloc(size);
  if (read(file, whole, size) != (ssize_t)size) return 1;
  close(file);
  int accepted = 0, forged = 0;
  for (int i = 0; i < count; ++i) {
    size_t length = size;
    uint8_t* data = NULL;
    if (posix_memalign((void**)&data, 64, size)) return 1;
    memcpy(data, whole, size);
    int kind = i % 4, seals = 0;
    if (kind == 0) length = draw() % size;                     /* cut off */
    else if (kind == 1) data[draw() % size] ^= 1u << draw() % 8; /* a bit */
    else if (kind == 2) {                                        /* header and table, and sealed again half of the time */
      data[draw() % 640] = (uint8_t)draw();
      seals = draw() % 2;
    } else { /* a word of the index, sealed again */
      uint64_t offset, bytes, word = draw() % 3 ? draw() % 64 - 2 : draw();
      memcpy(&offset, data + 128 + 8, 8);
      memcpy(&bytes, data + 128 + 16, 8);
      memcpy(data + offset + draw() % (bytes / 8) * 8, &word, 8);
      seals = 1;
    }
    if (seals) seal(data, length);
    int same = length == size && !memcmp(data, whole, size);
    uint8_t* exact = NULL; /* of the very length, so that a sanitizer sees what is read behind it */
    if (posix_memalign((void**)&exact, 64, length ? length : 1)) return 1;
    memcpy(exact, data, length);
    flam_error error = {0};
    flam_model* m = flam_load_memory(exact, length, NULL, &error);
    if (m && !seals && !same) ++accepted;
    if (m && seals && !same) {
      ++forged; /* a text or a bound may well be another: what it says of shapes must hold all the same */
      flam_tensor in = {NULL, FLAM_FLOAT32, 1, {N}, {1}}, out[4] = {{0}};
      flam_shapes(m, 0, &in, 1, out, flam_output_count(m, 0), &error);
    }
    if (!m && !error.message[0]) ++accepted;
    if (m) flam_unload(m);
    free(exact);
    free(data);
  }
  free(whole);
  printf("%d files, %d accepted, %d forged\n", count, accepted, forged);
  return accepted != 0;
}

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  path = argv[2];
  state = strtoull(argv[4], NULL, 10);
  return !strcmp(argv[1], "threads") ? threads(atoi(argv[3]), atoi(argv[4])) : damage(atoi(argv[3]));
}
