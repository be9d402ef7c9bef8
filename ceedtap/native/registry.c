/* A compiled program refers to a Python object (an operator, a consumer) by a 64-bit key. Python holds one reference
 * to the key; every executable holds one more, taken when XLA instantiates the custom call and dropped when XLA
 * destroys it, which is after the last execution of it has ended, wherever that runs. Python learns of the keys that
 * nothing refers to any more with ct_registry_reap and only then lets go of the object. */
#include "ceedtap.h"
#include "queue.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
  struct entry *next;
  uint64_t key;
  void *payload;
  size_t refs;
} entry;

enum { NUM_BUCKETS = 1024 };

struct ct_registry {
  pthread_mutex_t mutex;
  entry *buckets[NUM_BUCKETS];
  size_t size, dead; /* entries, and those without references */
};

static ct_registry operators = {.mutex = PTHREAD_MUTEX_INITIALIZER};
static ct_registry consumers = {.mutex = PTHREAD_MUTEX_INITIALIZER};
static ct_registry functions = {.mutex = PTHREAD_MUTEX_INITIALIZER};
static ct_registry pointwise_functions = {.mutex = PTHREAD_MUTEX_INITIALIZER};
ct_registry *ct_operators(void) { return &operators; }
ct_registry *ct_consumers(void) { return &consumers; }
ct_registry *ct_functions(void) { return &functions; }
ct_registry *ct_pointwise_functions(void) { return &pointwise_functions; }

static entry **find(ct_registry *registry, uint64_t key) {
  entry **slot = &registry->buckets[(key ^ (key >> 32)) % NUM_BUCKETS];
  while (*slot && (*slot)->key != key) slot = &(*slot)->next;
  return slot;
}

static int change(ct_registry *registry, uint64_t key, int delta) {
  pthread_mutex_lock(&registry->mutex);
  entry *found = *find(registry, key);
  if (found) {
    if (delta > 0 && found->refs == 0) registry->dead--; /* came back before it was reaped */
    if (delta > 0) found->refs++;
    else if (found->refs > 0 && --found->refs == 0) registry->dead++;
  }
  pthread_mutex_unlock(&registry->mutex);
  return found != NULL;
}

int ct_registry_add(ct_registry *registry, uint64_t key, void *payload) {
  entry *fresh = malloc(sizeof *fresh);
  if (!fresh) return -1;
  pthread_mutex_lock(&registry->mutex);
  entry **slot = find(registry, key);
  if (*slot) { /* known, perhaps not yet reaped */
    free(fresh);
    fresh = *slot;
    if (fresh->refs++ == 0) registry->dead--;
  } else {
    *fresh = (entry){.next = NULL, .key = key, .refs = 1};
    *slot = fresh;
    registry->size++;
  }
  fresh->payload = payload;
  pthread_mutex_unlock(&registry->mutex);
  return 0;
}

ct_consumer *ct_consumer_get(uint64_t id) {
  ct_consumer *fresh = calloc(1, sizeof *fresh);
  entry *new_entry = malloc(sizeof *new_entry);
  if (!fresh || !new_entry) {
    free(fresh);
    free(new_entry);
    return NULL;
  }
  pthread_mutex_lock(&consumers.mutex);
  entry **slot = find(&consumers, id);
  if (*slot) {
    free(fresh);
    free(new_entry);
    if ((*slot)->refs++ == 0) consumers.dead--;
  } else {
    fresh->id = id;
    fresh->every = 1;
    fresh->enabled = 1;
    *new_entry = (entry){.next = NULL, .key = id, .payload = fresh, .refs = 1};
    *slot = new_entry;
    consumers.size++;
  }
  ct_consumer *consumer = (*slot)->payload;
  pthread_mutex_unlock(&consumers.mutex);
  return consumer;
}

/* Starts with the settings of another consumer, and keeps it. The lock is held. */
static void resemble(ct_consumer *consumer, entry *other) {
  const ct_consumer *model = other->payload;
  if (other->refs++ == 0) consumers.dead--;
  consumer->like = other->key;
  consumer->policy = model->policy;
  consumer->every = model->every;
  memcpy(consumer->name, model->name, sizeof consumer->name);
  __atomic_store_n(&consumer->enabled, __atomic_load_n(&model->enabled, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

int ct_consumer_describe(ct_consumer *consumer, const void *description, size_t size, const uint32_t *like, int num_like) {
  int done = 1;
  pthread_mutex_lock(&consumers.mutex);
  if (!consumer->description && !consumer->route) {
    void *copy = malloc(size);
    done = copy != NULL;
    if (done) {
      memcpy(copy, description, size);
      consumer->description_size = size;
      consumer->description = copy;
    }
    for (int i = 0; i < num_like && !consumer->like; i++) {
      entry *other = *find(&consumers, (uint64_t)like[2 * i] << 32 | like[2 * i + 1]);
      if (other) resemble(consumer, other);
    }
  }
  pthread_mutex_unlock(&consumers.mutex);
  return done;
}

size_t ct_consumers_unknown(ct_consumer **found, size_t max) {
  size_t n = 0;
  pthread_mutex_lock(&consumers.mutex);
  for (size_t b = 0; b < NUM_BUCKETS && n < max; b++) {
    for (entry *entry = consumers.buckets[b]; entry && n < max; entry = entry->next) {
      ct_consumer *consumer = entry->payload;
      if (consumer->description && !consumer->route) found[n++] = consumer;
    }
  }
  pthread_mutex_unlock(&consumers.mutex);
  return n;
}

int ct_registry_ref(ct_registry *registry, uint64_t key) { return change(registry, key, 1); }
void ct_registry_unref(ct_registry *registry, uint64_t key) { change(registry, key, -1); }

void *ct_registry_payload(ct_registry *registry, uint64_t key) {
  pthread_mutex_lock(&registry->mutex);
  entry *found = *find(registry, key);
  void *payload = found ? found->payload : NULL;
  pthread_mutex_unlock(&registry->mutex);
  return payload;
}

size_t ct_registry_reap(ct_registry *registry, uint64_t *keys, void **payloads, size_t max) {
  size_t n = 0;
  pthread_mutex_lock(&registry->mutex);
  for (size_t b = 0; b < NUM_BUCKETS && n < max && registry->dead > 0; b++) {
    entry **slot = &registry->buckets[b];
    while (*slot && n < max) {
      entry *candidate = *slot;
      if (candidate->refs > 0) {
        slot = &candidate->next;
        continue;
      }
      payloads[n] = candidate->payload;
      keys[n++] = candidate->key;
      *slot = candidate->next;
      registry->size--;
      registry->dead--;
      free(candidate);
    }
  }
  pthread_mutex_unlock(&registry->mutex);
  return n;
}

size_t ct_registry_size(ct_registry *registry) {
  pthread_mutex_lock(&registry->mutex);
  size_t size = registry->size;
  pthread_mutex_unlock(&registry->mutex);
  return size;
}

void ct_registries_before_fork(void) {
  pthread_mutex_lock(&operators.mutex);
  pthread_mutex_lock(&consumers.mutex);
  pthread_mutex_lock(&functions.mutex);
  pthread_mutex_lock(&pointwise_functions.mutex);
}

void ct_registries_after_fork(int in_child) {
  if (!in_child) {
    pthread_mutex_unlock(&pointwise_functions.mutex);
    pthread_mutex_unlock(&functions.mutex);
    pthread_mutex_unlock(&consumers.mutex);
    pthread_mutex_unlock(&operators.mutex);
    return;
  }
  operators.mutex = consumers.mutex = functions.mutex = pointwise_functions.mutex =
      (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  for (size_t b = 0; b < NUM_BUCKETS; b++) {
    for (entry *entry = consumers.buckets[b]; entry; entry = entry->next) {
      ct_consumer *consumer = entry->payload;
      consumer->offered = 0;
      memset(consumer->counts, 0, sizeof consumer->counts);
    }
  }
}
