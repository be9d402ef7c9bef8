/* The producers' side of the queue. */
#ifndef CEEDTAP_QUEUE_H
#define CEEDTAP_QUEUE_H

#include "ceedtap.h"

/* A frame to fill, or what became of the event (CT_RESERVED ...). */
int ct_queue_reserve(ct_consumer *consumer, int32_t device, uint64_t size, ct_frame **frame);
void ct_queue_commit(ct_frame *frame);
/* registry.c. What a program says of the tap, kept when it is the first to say so; and the ids, in halves, of consumers:
 * it starts with the settings of the first that there is. 0: no memory. */
int ct_consumer_describe(ct_consumer *consumer, const void *description, size_t size, const uint32_t *like, int num_like);

/* registry.c. In the child, the counts of the consumers start at 0. */
void ct_registries_before_fork(void);
void ct_registries_after_fork(int in_child);

#endif
