/* How the threads of a product wait for one another.
 *
 * OpenMP's threads wait awake, which is fastest while the cores are theirs alone. When others want
 * the cores, a thread that waits awake takes the time in which the one that it waits for could run.
 * libgomp counts the teams of all threads together, and once there are more members than cores
 * everybody waits asleep. So a team that does nothing is the switch: there is no other one at run
 * time.
 */
#include <pthread.h>

static pthread_mutex_t gate_of_team = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t team_may_go = PTHREAD_COND_INITIALIZER;
static pthread_t idle_thread;
static int idle_team;

static void *hold_team(void *unused) {
#ifdef _OPENMP
    int members = 0;
#pragma omp parallel num_threads(omp_get_num_procs()) reduction(+ : members)
    members += 1;
#endif
    pthread_mutex_lock(&gate_of_team);
    while (idle_team) pthread_cond_wait(&team_may_go, &gate_of_team);
    pthread_mutex_unlock(&gate_of_team);
    return unused;
}

/* Wait asleep from now on (1), or awake again (0). One caller at a time. */
void coa_wait_asleep(int asleep) {
    if (asleep == idle_team) return;
    pthread_mutex_lock(&gate_of_team);
    idle_team = asleep;
    pthread_mutex_unlock(&gate_of_team);
    if (asleep) {
        if (pthread_create(&idle_thread, NULL, hold_team, NULL)) idle_team = 0;
    } else {
        pthread_cond_signal(&team_may_go);
        pthread_join(idle_thread, NULL);
    }
}
