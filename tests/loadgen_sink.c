/* What `tests.loadgen_cost` measures against: a server that is never late by much.

   usage: sink STREAMS EVENTS PERIOD_US SPREAD_US BEFORE AFTER DONE

   Prints its port. GETs get a list of one model. Once STREAMS POSTs have come, each gets EVENTS
   events BEFORE <stamp> AFTER, then DONE and the end of the connection. PERIOD_US 0: as fast as they
   are taken; else one per stream and period, each written by one call, the streams evenly spread over
   SPREAD_US of it; 0: all at once, as a server's step ends for all rows. The stamp is CLOCK_MONOTONIC
   in microseconds, read just before the write.

   In C, since a server in Python is late by its own timers and its collector, and what it is late
   by falls on the reader. */

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 512, ROOM = 1 << 16 };

static const char MODELS[] = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 24\r\n\r\n"
                             "{\"data\":[{\"id\":\"demo\"}]}";
static const char HEAD[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";

static void check(int is_good, const char *what) {
  if (!is_good) {
    perror(what);
    exit(1);
  }
}

static void send_all(int fd, const char *data, size_t size) {
  while (size > 0) {
    ssize_t sent = write(fd, data, size);
    check(sent > 0 || errno == EINTR, "write");
    if (sent > 0) data += sent, size -= (size_t)sent;
  }
}

static long long now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

static void sleep_until(long long us) {
  struct timespec due = {us / 1000000, us % 1000000 * 1000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {
  }
}

static int listen_somewhere(void) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  check(listener >= 0 && bind(listener, (void *)&address, size) == 0, "bind");
  check(listen(listener, MOST) == 0, "listen");
  check(getsockname(listener, (void *)&address, &size) == 0, "getsockname");
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  return listener;
}

/* Whether a stream was asked for; answers anything else. Reads the head and the whole body, since a
   connection that is closed with bytes unread is reset. */
static int is_stream(int fd) {
  static char request[ROOM];
  size_t have = 0, want = ROOM - 1;
  while (have < want) {
    ssize_t got = read(fd, request + have, ROOM - 1 - have);
    if (got <= 0) return close(fd), 0;
    request[have += (size_t)got] = 0;
    char *end = strstr(request, "\r\n\r\n"), *length = strcasestr(request, "\ncontent-length:");
    size_t body = end && length && length < end ? strtoul(length + 16, NULL, 10) : 0;
    if (end) want = (size_t)(end + 4 - request) + body;
  }
  if (strncmp(request, "POST", 4) == 0) return 1;
  send_all(fd, MODELS, sizeof MODELS - 1);
  return close(fd), 0;
}

int main(int argc, char **argv) {
  check(argc == 8, "usage");
  signal(SIGPIPE, SIG_IGN);
  int num_streams = atoi(argv[1]), num_events = atoi(argv[2]), num_open = 0, on = 1;
  long long period = atoll(argv[3]), spread = atoll(argv[4]);
  static int streams[MOST];
  static char event[ROOM];
  check(num_streams > 0 && num_streams <= MOST, "STREAMS");
  int listener = listen_somewhere();
  while (num_open < num_streams) {
    int fd = accept(listener, NULL, NULL);
    check(fd >= 0, "accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (!is_stream(fd)) continue;
    send_all(fd, HEAD, sizeof HEAD - 1);
    streams[num_open++] = fd;
  }
  long long zero = now_us() + period;
  for (int idx = 0; idx < num_events; idx++)
    for (int at = 0; at < num_streams; at++) {
      if (period) sleep_until(zero + idx * period + at * spread / num_streams);
      int size = snprintf(event, ROOM, "%s%lld%s", argv[5], now_us(), argv[6]);
      send_all(streams[at], event, (size_t)size);
    }
  for (int at = 0; at < num_streams; at++) {
    send_all(streams[at], argv[7], strlen(argv[7]));
    close(streams[at]);
  }
  for (;;) { /* the counters, after the load */
    int fd = accept(listener, NULL, NULL);
    if (fd >= 0 && is_stream(fd)) close(fd);
  }
}
