/* The pool of threads. A parallel part has members that do not wait for each other: free threads, and always the caller,
   take them in turn. So several callers can share the pool. The number of members, on which results may depend, does not
   depend on how many threads are free. */
#include "internal.h"

#include <sched.h>
#include <unistd.h>

typedef struct job {
  void (*part)(void*);
  void* data;
  int members, next;
  _Atomic int done;
  struct job* after;
} job;

#define MOST 256
#define SPINS 4000 /* some ten microseconds: kernels follow each other closely, and waking a thread takes longer */

static struct {
  pthread_mutex_t lock;
  pthread_cond_t work, finished;
  job* first;          /* jobs with members that no thread has taken yet */
  _Atomic int waiting; /* the number of such members */
  _Atomic int threads;
  int started, cores;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0, 0};

static __thread int member_now = 0, members_now = 1;

int fl_member(void) { return member_now; }
int fl_members(void) { return members_now; }

static void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

static int available_cores(void) {
  cpu_set_t set;
  int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
  return count < 1 ? 1 : count > MOST ? MOST : count;
}

/* A forked child has none of the threads. */
static void in_child(void) {
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.work, NULL);
  pthread_cond_init(&pool.finished, NULL);
  pool.first = NULL;
  pool.started = 0;
  atomic_store(&pool.waiting, 0);
}

static void begin(void) {
  const char* asked = getenv("OMP_NUM_THREADS");
  int count = asked ? atoi(asked) : 0;
  pool.cores = available_cores();
  if (atomic_load(&pool.threads) == 0) atomic_store(&pool.threads, count < 1 ? pool.cores : count > MOST ? MOST : count);
  pthread_atfork(NULL, NULL, in_child);
}

int flam_threads(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, begin);
  return atomic_load(&pool.threads);
}

void flam_set_threads(int count) {
  flam_threads();
  atomic_store(&pool.threads, count < 1 ? 1 : count > MOST ? MOST : count);
}

static void run_member(job* j, int member) {
  int before = member_now, of = members_now;
  member_now = member, members_now = j->members;
  j->part(j->data);
  member_now = before, members_now = of;
}

/* With the lock held: the next member of the first job, or -1. */
static int taken(job* j) {
  int member = j->next++;
  if (j->next == j->members) {
    job** at = &pool.first;
    while (*at != j) at = &(*at)->after;
    *at = j->after;
  }
  atomic_fetch_sub(&pool.waiting, 1);
  return member;
}

/* With the lock held: the job may be freed when it is released. */
static void ended(job* j) {
  if (atomic_fetch_add(&j->done, 1) + 1 == j->members) pthread_cond_broadcast(&pool.finished);
}

static void* work(void* unused) {
  (void)unused;
  pthread_mutex_lock(&pool.lock);
  for (;;) {
    while (!pool.first) {
      pthread_mutex_unlock(&pool.lock);
      for (int k = 0; k < SPINS && pool.cores > 1 && !atomic_load(&pool.waiting); ++k) pause_briefly();
      pthread_mutex_lock(&pool.lock);
      if (!pool.first) pthread_cond_wait(&pool.work, &pool.lock);
    }
    job* j = pool.first;
    int member = taken(j);
    pthread_mutex_unlock(&pool.lock);
    run_member(j, member);
    pthread_mutex_lock(&pool.lock);
    ended(j);
  }
  return NULL;
}

/* With the lock held. If a thread cannot be created, the others do its share. */
static void start(int wanted) {
  pthread_attr_t attributes;
  if (pool.started >= wanted || pthread_attr_init(&attributes)) return;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, (size_t)8 << 20); /* kernels keep blocks of matrices there */
  pthread_t id;
  while (pool.started < wanted && !pthread_create(&id, &attributes, work, NULL)) ++pool.started;
  pthread_attr_destroy(&attributes);
}

void fl_parallel(void (*part)(void*), void* data, unsigned members) {
  int threads = flam_threads(), count = members ? (int)members : threads;
  job j = {part, data, count, 0, 0, NULL};
  if (count == 1 || threads == 1) {
    for (int k = 0; k < count; ++k) run_member(&j, k);
    return;
  }
  pthread_mutex_lock(&pool.lock);
  start(threads - 1);
  j.after = pool.first;
  pool.first = &j;
  atomic_fetch_add(&pool.waiting, count);
  pthread_cond_broadcast(&pool.work);
  while (j.next < j.members) {
    int member = taken(&j);
    pthread_mutex_unlock(&pool.lock);
    run_member(&j, member);
    pthread_mutex_lock(&pool.lock);
    ended(&j);
  }
  if (atomic_load(&j.done) < count && pool.cores > 1) {
    pthread_mutex_unlock(&pool.lock);
    for (int k = 0; k < SPINS && atomic_load(&j.done) < count; ++k) pause_briefly();
    pthread_mutex_lock(&pool.lock);
  }
  while (atomic_load(&j.done) < count) pthread_cond_wait(&pool.finished, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
}
