/* One direction of a long line, for kernels without netem.
 *
 *   line IN OUT DELAY_MS RATE_MBIT LOST_OF_1000 QUEUE_MS MOST_BYTES
 *
 * Takes packets from the TUN device whose open descriptor is IN, and gives them to OUT. It sends so many bits in a second,
 * keeps what waits for that in a queue, drops what does not fit there, loses some packets at random, and delays the others.
 * Runs until its standard input ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { PLACES = 1 << 16, AT_ONCE = 64 };

struct packet {
    double due;
    ssize_t size;
    char *bytes;
};

static struct packet ring[PLACES];

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
    if (argc != 8) {
        fprintf(stderr, "usage: line IN OUT DELAY_MS RATE_MBIT LOST_OF_1000 QUEUE_MS MOST_BYTES\n");
        return 2;
    }
    struct pollfd watched[] = {{atoi(argv[1]), POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    int out = atoi(argv[2]), most = atoi(argv[7]);
    double delay = atof(argv[3]) / 1e3, rate = atof(argv[4]) * 1e6 / 8, lost = atof(argv[5]) / 1e3, queue = atof(argv[6]) / 1e3;
    size_t first = 0, last = 0; /* the packets in the ring are those from `first` up to `last` */
    double idle = 0;            /* when everything in the queue has been sent */

    for (;;) {
        double at = now();
        for (int taken = 0; taken < AT_ONCE && last - first < PLACES; taken++) {
            struct packet *packet = &ring[last % PLACES];
            if (!packet->bytes && !(packet->bytes = malloc(most))) return 1;
            packet->size = read(watched[0].fd, packet->bytes, most);
            if (packet->size <= 0) break;
            double begin = idle > at ? idle : at;
            if (begin - at > queue || drand48() < lost) continue;
            idle = begin + packet->size / rate;
            packet->due = idle + delay;
            last++;
        }
        for (at = now(); first != last && ring[first % PLACES].due <= at; first++) {
            struct packet *packet = &ring[first % PLACES];
            while (write(out, packet->bytes, packet->size) < 0 && errno == EAGAIN) usleep(20);
        }
        double wait = first == last ? 1 : ring[first % PLACES].due - now();
        if (wait > 0) {
            struct timespec time = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
            ppoll(watched, 2, &time, NULL);
            if (watched[1].revents) return 0;
        }
    }
}
