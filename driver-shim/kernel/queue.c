// SPDX-License-Identifier: GPL-2.0-only
/*
 * The control queue: one request at a time.
 *
 * A device that does not answer in time keeps the buffers until it is reset,
 * and is not asked again.
 */

#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "lamina.h"

/* A flush of many dirty pages is the slowest; the device's own limit is 120. */
#define LAMINA_ANSWER_TIMEOUT	(150 * HZ)

static void lamina_answered(struct virtqueue *queue)
{
	struct lamina *lamina = queue->vdev->priv;

	complete(&lamina->answered);
}

int lamina_queue_init(struct lamina *lamina)
{
	lamina->request = kmalloc(sizeof(*lamina->request), GFP_KERNEL);
	lamina->response = kmalloc(sizeof(*lamina->response), GFP_KERNEL);
	lamina->text = kmalloc(LAMINA_TEXT_BYTES, GFP_KERNEL);
	lamina->piece = kmalloc(LAMINA_TEXT_BYTES, GFP_KERNEL);
	if (!lamina->request || !lamina->response || !lamina->text ||
	    !lamina->piece)
		return -ENOMEM;
	lamina->queue = virtio_find_single_vq(lamina->vdev, lamina_answered,
					      "control");
	return PTR_ERR_OR_ZERO(lamina->queue);
}

/* The device has been reset, or never had a queue. */
void lamina_queue_free(struct lamina *lamina)
{
	lamina->vdev->config->del_vqs(lamina->vdev);
	lamina->queue = NULL;
}

static int lamina_errno(u32 status)
{
	switch (status) {
	case LAMINA_OK:
		return 0;
	case LAMINA_MALFORMED:
		return -EINVAL;
	case LAMINA_RANGE:
		return -ERANGE;
	case LAMINA_OVERLAP:
		return -EEXIST;
	case LAMINA_FULL:
		return -ENOSPC;
	case LAMINA_UNKNOWN:
		return -ENOENT;
	default:
		return -EIO;
	}
}

/*
 * Makes the request that is in the buffers, with so many bytes of text.
 * Returns the bytes of the piece that came.
 */
static int lamina_exchange(struct lamina *lamina, u32 text_bytes)
{
	struct scatterlist request, text, response, piece;
	struct scatterlist *sgs[] = { &request, &text, &response, &piece };
	unsigned long deadline = jiffies + LAMINA_ANSWER_TIMEOUT;
	unsigned int length;
	int err;

	lockdep_assert_held(&lamina->queue_lock);
	if (lamina->broken)
		return -ENODEV;
	sg_init_one(&request, lamina->request, sizeof(*lamina->request));
	sg_init_one(&text, lamina->text, text_bytes ?: 1);
	sg_init_one(&response, lamina->response, sizeof(*lamina->response));
	sg_init_one(&piece, lamina->piece, LAMINA_TEXT_BYTES);
	if (!text_bytes) {
		sgs[1] = &response;
		sgs[2] = &piece;
	}
	err = virtqueue_add_sgs(lamina->queue, sgs, text_bytes ? 2 : 1, 2,
				lamina, GFP_KERNEL);
	if (err)
		return err;
	reinit_completion(&lamina->answered);
	virtqueue_kick(lamina->queue);
	while (!virtqueue_get_buf(lamina->queue, &length)) {
		if (virtqueue_is_broken(lamina->queue) ||
		    time_after(jiffies, deadline)) {
			dev_err(&lamina->vdev->dev, "the device does not answer\n");
			lamina->broken = true;
			return -ETIMEDOUT;
		}
		/* Now and then without being told: a call may be lost. */
		wait_for_completion_timeout(&lamina->answered, HZ / 4);
	}
	if (length < sizeof(*lamina->response))
		return -EPROTO;
	err = lamina_errno(le32_to_cpu(lamina->response->status));
	if (err)
		return err;
	return min_t(u32, length - sizeof(*lamina->response),
		     LAMINA_TEXT_BYTES);
}

static void lamina_compose(struct lamina *lamina, enum lamina_op op,
			   u32 window, u64 offset, u64 length, u64 at)
{
	lamina->request->op = cpu_to_le32(op);
	lamina->request->window = cpu_to_le32(window);
	lamina->request->offset = cpu_to_le64(offset);
	lamina->request->length = cpu_to_le64(length);
	lamina->request->at = cpu_to_le64(at);
}

/* Makes a request without text. */
int lamina_do(struct lamina *lamina, enum lamina_op op, u32 window,
	      u64 offset, u64 length, u64 at)
{
	int done;

	mutex_lock(&lamina->queue_lock);
	lamina_compose(lamina, op, window, offset, length, at);
	done = lamina_exchange(lamina, 0);
	/*
	 * QEMU answers the device before its own map of the memory is made
	 * anew, under the lock that this access takes as well.
	 */
	if (done >= 0 && op == LAMINA_OP_MAP)
		lamina->vdev->config->get_status(lamina->vdev);
	mutex_unlock(&lamina->queue_lock);
	return min(done, 0);
}

/* Makes a request of text and gives its answer to a program, in pieces. */
int lamina_talk(struct lamina *lamina, struct lamina_ask *ask)
{
	void __user *answer = u64_to_user_ptr(ask->answer);
	u64 given = 0;
	int err = 0;

	if (!ask->request_bytes || ask->request_bytes > LAMINA_TEXT_BYTES)
		return -EMSGSIZE;
	mutex_lock(&lamina->queue_lock);
	/* A device that does not answer may still read the buffer. */
	if (lamina->broken) {
		err = -ENODEV;
		goto unlock;
	}
	if (copy_from_user(lamina->text, u64_to_user_ptr(ask->request),
			   ask->request_bytes)) {
		err = -EFAULT;
		goto unlock;
	}
	lamina_compose(lamina, LAMINA_OP_ASK, 0, 0, 0, 0);
	err = lamina_exchange(lamina, ask->request_bytes);
	ask->total = err < 0 ? 0 : le64_to_cpu(lamina->response->total);
	while (err >= 0) {
		u64 room = min_t(u64, ask->total, ask->answer_bytes) - given;
		u32 piece = min_t(u64, err, room);

		if (copy_to_user(answer + given, lamina->piece, piece)) {
			err = -EFAULT;
			break;
		}
		given += piece;
		if (piece == room) {
			err = 0;
			break;
		}
		if (!piece) {
			err = -EPROTO;
			break;
		}
		lamina_compose(lamina, LAMINA_OP_MORE, 0, given, 0, 0);
		err = lamina_exchange(lamina, 0);
	}
unlock:
	mutex_unlock(&lamina->queue_lock);
	return err;
}
