/* Turns of the engine's loop in which nothing but decoding goes on, taken down as numbers while they are looked at.

llm_serving/flight/turn_log.py says what this does, in Python; the tests run both and compare. It is in C because in a
server at work a step's objects are out of the processor's caches half a second later, and so is Python's code a step
later: here a turn leaves 32 bytes, and touches what the scheduler has just touched.

A call that is not as expected is refused, and nothing has changed then. Fields of steps and answers are read where
their classes, which have __slots__, keep them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

enum { REFUSED, TAKEN, DUE };

/* IDLE takes nothing; then a turn has not begun, has answers, has steps. */
enum stage { IDLE, BETWEEN, ANSWERED, SENT };

/* More answers than this in the turn that makes the log full are refused. */
enum { SPARE_ANSWERS = 16 };

/* From KIND to REASON: the same objects in every step of a batch. */
enum {
    SEQ, KIND, REQUESTS, ROWS, QUERY_LENS, DO_SAMPLE, BLOCK_TABLES, RESTARTS, REASON,
    STARTS, SAMPLE_POSITIONS, MOVES, HISTORIES, NUM_STEP_FIELDS
};
static const char *const STEP_FIELDS[] = {
    "seq", "kind", "requests", "rows", "query_lens", "do_sample", "block_tables", "restarts", "reason",
    "starts", "sample_positions", "moves", "histories"
};

enum { ANSWER_SEQ, ERROR, ABORTED, SAMPLED_IDS, LOGITS, LOGSUMEXPS, QUEUE_US, GRAPH_US, SAMPLE_US, NUM_ANSWER_FIELDS };
static const char *const ANSWER_FIELDS[] = {
    "seq", "error", "aborted", "sampled_ids", "logits", "logsumexps", "queue_us", "graph_us", "sample_us"
};

typedef struct {
    long long queue_us, graph_us, sample_us;
} Answer;

typedef struct {
    long long start, position; /* in the step that the log began with */
    Py_ssize_t blocks;         /* length of the block table in the latest step */
} Row;

typedef struct {
    PyObject_HEAD
    PyTypeObject *step_type, *answer_type;
    PyObject *counts;
    Py_ssize_t step_fields[NUM_STEP_FIELDS], answer_fields[NUM_ANSWER_FIELDS];
    Py_ssize_t max_turns;

    double due;
    long long num_steps;

    enum stage stage;
    PyObject *latest;                       /* step */
    PyObject *shared[REASON + 1];           /* its columns, borrowed from it */
    PyObject *endings;                      /* set of token ids */
    int keeps_updates;
    Py_ssize_t size;                        /* sequences */
    Row *rows;
    long long next_answer, next_step;       /* their numbers */
    long long num_since;                    /* steps since the log began */

    /* Since they were last taken; of the turn under way at [num_turns], and in ``turn_...``. */
    Py_ssize_t num_turns, num_answers, num_sent;
    double *times;
    Answer *answers;
    PyObject *growths, *states, *updates, *odd_turns; /* lists */
    Py_ssize_t turn_answers, turn_steps;
} TurnLog;

static PyObject *field(PyObject *thing, Py_ssize_t offset) { return *(PyObject **)((char *)thing + offset); }

static int number(PyObject *value, long long *result) {
    int overflow;
    if (value == NULL || !PyLong_CheckExact(value)) return 0;
    *result = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow;
}

static int is_list(PyObject *value, Py_ssize_t size) {
    return value != NULL && PyList_CheckExact(value) && PyList_GET_SIZE(value) == size;
}

/* Where instances of a class keep fields that are slots. */
static int find_fields(PyTypeObject *type, const char *const *names, int count, Py_ssize_t *offsets) {
    for (int index = 0; index < count; index++) {
        PyObject *slot = PyObject_GetAttrString((PyObject *)type, names[index]);
        if (slot == NULL) return -1;
        int is_member = Py_IS_TYPE(slot, &PyMemberDescr_Type);
        const PyMemberDef *member = is_member ? ((PyMemberDescrObject *)slot)->d_member : NULL;
        int is_slot = member != NULL && member->type == T_OBJECT_EX;
        if (is_slot) offsets[index] = member->offset;
        Py_DECREF(slot);
        if (!is_slot) {
            PyErr_Format(PyExc_TypeError, "%s.%s is not a slot", type->tp_name, names[index]);
            return -1;
        }
    }
    return 0;
}

static int log_init(TurnLog *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"step_type", "answer_type", "counts", "max_turns", NULL};
    PyTypeObject *step_type, *answer_type;
    PyObject *counts;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!On", names, &PyType_Type, &step_type, &PyType_Type,
                                     &answer_type, &counts, &self->max_turns)) {
        return -1;
    }
    if (self->times != NULL || self->max_turns < 1) {
        PyErr_SetString(PyExc_ValueError, "a log begins once, with room for a turn");
        return -1;
    }
    if (find_fields(step_type, STEP_FIELDS, NUM_STEP_FIELDS, self->step_fields) < 0) return -1;
    if (find_fields(answer_type, ANSWER_FIELDS, NUM_ANSWER_FIELDS, self->answer_fields) < 0) return -1;
    self->step_type = (PyTypeObject *)Py_NewRef(step_type);
    self->answer_type = (PyTypeObject *)Py_NewRef(answer_type);
    self->counts = Py_NewRef(counts);
    self->times = PyMem_Calloc(self->max_turns + 1, sizeof(double));
    self->answers = PyMem_Calloc(self->max_turns + SPARE_ANSWERS, sizeof(Answer));
    self->growths = PyList_New(0);
    self->states = PyList_New(0);
    self->updates = PyList_New(0);
    self->odd_turns = PyList_New(0);
    if (self->times == NULL || self->answers == NULL || self->growths == NULL || self->states == NULL
        || self->updates == NULL || self->odd_turns == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void log_dealloc(TurnLog *self) {
    Py_CLEAR(self->latest);
    Py_CLEAR(self->endings);
    Py_CLEAR(self->growths);
    Py_CLEAR(self->states);
    Py_CLEAR(self->updates);
    Py_CLEAR(self->odd_turns);
    Py_CLEAR(self->counts);
    Py_CLEAR(self->step_type);
    Py_CLEAR(self->answer_type);
    PyMem_Free(self->rows);
    PyMem_Free(self->answers);
    PyMem_Free(self->times);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *log_begin(TurnLog *self, PyObject *args) {
    PyObject *latest, *table_lens, *endings;
    long long first_answer, start, position, length;
    int keeps_updates;
    if (!PyArg_ParseTuple(args, "LO!O!O!p", &first_answer, self->step_type, &latest, &PyList_Type, &table_lens,
                          &PySet_Type, &endings, &keeps_updates)) {
        return NULL;
    }
    PyObject *columns[NUM_STEP_FIELDS];
    for (int index = 0; index < NUM_STEP_FIELDS; index++) columns[index] = field(latest, self->step_fields[index]);
    Py_ssize_t size = PyList_GET_SIZE(table_lens);
    long long seq;
    if (self->stage != IDLE || self->num_turns != 0 || !number(columns[SEQ], &seq) || !is_list(columns[STARTS], size)
        || !is_list(columns[SAMPLE_POSITIONS], size) || !is_list(columns[BLOCK_TABLES], size)) {
        PyErr_SetString(PyExc_ValueError, "the log is at work, or a step has columns of several sizes");
        return NULL;
    }
    Row *rows = PyMem_Realloc(self->rows, (size + 1) * sizeof(Row));
    if (rows == NULL) return PyErr_NoMemory();
    self->rows = rows;
    for (Py_ssize_t index = 0; index < size; index++) {
        if (!number(PyList_GET_ITEM(columns[STARTS], index), &start)
            || !number(PyList_GET_ITEM(columns[SAMPLE_POSITIONS], index), &position)
            || !number(PyList_GET_ITEM(table_lens, index), &length)) {
            PyErr_SetString(PyExc_ValueError, "a start, a position or a length is no number");
            return NULL;
        }
        rows[index] = (Row){start, position, length};
    }
    Py_XSETREF(self->latest, Py_NewRef(latest));
    Py_XSETREF(self->endings, Py_NewRef(endings));
    memcpy(self->shared, columns, sizeof(self->shared));
    self->keeps_updates = keeps_updates;
    self->size = size;
    self->next_answer = first_answer;
    self->next_step = seq + 1;
    self->num_since = 0;
    self->stage = BETWEEN;
    Py_RETURN_NONE;
}

static int are_plain_tokens(PyObject *tokens, PyObject *endings) {
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tokens); index++) {
        PyObject *item = PyList_GET_ITEM(tokens, index);
        long long token;
        if (!number(item, &token) || token < 0) return 0;
        if (PySet_GET_SIZE(endings) != 0 && PySet_Contains(endings, item)) return 0;
    }
    return 1;
}

static PyObject *log_answer(TurnLog *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "answer takes 3 arguments");
    PyObject *answer = args[0], *updates = args[1], *now = args[2];
    if (self->stage == IDLE || self->stage == SENT || !Py_IS_TYPE(answer, self->answer_type) || !PyFloat_CheckExact(now)
        || self->num_turns == self->max_turns || self->num_answers == self->max_turns + SPARE_ANSWERS
        || (self->stage == ANSWERED && PyFloat_AS_DOUBLE(now) != self->times[self->num_turns])) {
        Py_RETURN_FALSE;
    }
    PyObject *columns[NUM_ANSWER_FIELDS];
    for (int index = 0; index < NUM_ANSWER_FIELDS; index++) columns[index] = field(answer, self->answer_fields[index]);
    long long seq;
    Answer times;
    Py_ssize_t size = self->size;
    if (!number(columns[ANSWER_SEQ], &seq) || seq != self->next_answer || columns[ERROR] != Py_None
        || columns[ABORTED] != Py_False || !is_list(updates, size) || !is_list(columns[SAMPLED_IDS], size)
        || !is_list(columns[LOGITS], size) || !is_list(columns[LOGSUMEXPS], size)
        || !number(columns[QUEUE_US], &times.queue_us) || !number(columns[GRAPH_US], &times.graph_us)
        || !number(columns[SAMPLE_US], &times.sample_us) || !are_plain_tokens(columns[SAMPLED_IDS], self->endings)) {
        Py_RETURN_FALSE;
    }
    if (self->keeps_updates && PyList_Append(self->updates, updates) < 0) return NULL;
    self->times[self->num_turns] = PyFloat_AS_DOUBLE(now);
    self->answers[self->num_answers++] = times;
    self->turn_answers++;
    self->next_answer++;
    self->stage = ANSWERED;
    Py_RETURN_TRUE;
}

static int is_time_of_turn(TurnLog *self, PyObject *now) {
    return PyFloat_CheckExact(now) && PyFloat_AS_DOUBLE(now) == self->times[self->num_turns];
}

static int append(PyObject *list, PyObject *item) {
    if (item == NULL) return -1;
    int result = PyList_Append(list, item);
    Py_DECREF(item);
    return result;
}

/* The blocks that the next step brings, and the counts that go with them. */
static int note_growth(TurnLog *self) {
    PyObject *tables = self->shared[BLOCK_TABLES];
    for (Py_ssize_t index = 0; index < self->size; index++) {
        PyObject *table = PyList_GET_ITEM(tables, index);
        Py_ssize_t told = self->rows[index].blocks, length = PyList_GET_SIZE(table);
        if (length == told) continue;
        PyObject *blocks = PyList_GetSlice(table, told, length);
        if (blocks == NULL) return -1;
        if (append(self->growths, Py_BuildValue("(nnnN)", self->num_sent, index, told, blocks)) < 0) return -1;
        self->rows[index].blocks = length;
    }
    PyObject *counts = PyObject_CallNoArgs(self->counts);
    if (counts == NULL) return -1;
    return append(self->states, Py_BuildValue("(nN)", self->num_sent, counts));
}

static PyObject *log_step(TurnLog *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "step takes 2 arguments");
    PyObject *step = args[0];
    int is_expected = self->stage == ANSWERED || self->stage == SENT;
    if (!is_expected || !Py_IS_TYPE(step, self->step_type) || !is_time_of_turn(self, args[1])) Py_RETURN_FALSE;
    PyObject *columns[NUM_STEP_FIELDS];
    for (int index = 0; index < NUM_STEP_FIELDS; index++) columns[index] = field(step, self->step_fields[index]);
    for (int index = KIND; index <= REASON; index++) {
        if (columns[index] != self->shared[index]) Py_RETURN_FALSE;
    }
    Py_ssize_t size = self->size;
    long long seq, since = self->num_since + 1;
    if (!number(columns[SEQ], &seq) || seq != self->next_step || !is_list(columns[STARTS], size)
        || !is_list(columns[SAMPLE_POSITIONS], size) || !is_list(columns[BLOCK_TABLES], size)
        || !is_list(columns[MOVES], 0) || !is_list(columns[HISTORIES], 0)) {
        Py_RETURN_FALSE;
    }
    int has_grown = 0;
    for (Py_ssize_t index = 0; index < size; index++) {
        Row *row = &self->rows[index];
        PyObject *table = PyList_GET_ITEM(columns[BLOCK_TABLES], index);
        long long start, position;
        if (!number(PyList_GET_ITEM(columns[STARTS], index), &start) || start != row->start + since
            || !number(PyList_GET_ITEM(columns[SAMPLE_POSITIONS], index), &position)
            || position != row->position + since
            || !PyList_CheckExact(table) || PyList_GET_SIZE(table) < row->blocks) {
            Py_RETURN_FALSE;
        }
        has_grown |= PyList_GET_SIZE(table) != row->blocks;
    }
    if (has_grown && note_growth(self) < 0) return NULL;
    Py_SETREF(self->latest, Py_NewRef(step));
    self->num_sent++;
    self->num_since++;
    self->num_steps++;
    self->turn_steps++;
    self->next_step++;
    self->stage = SENT;
    Py_RETURN_TRUE;
}

/* The turn under way is over, or no more of it is taken down. */
static int close_turn(TurnLog *self, int has_ended) {
    if (self->turn_answers != 1 || self->turn_steps != 1 || !has_ended) {
        PyObject *odd = Py_BuildValue("(nnnO)", self->num_turns, self->turn_answers, self->turn_steps,
                                      has_ended ? Py_True : Py_False);
        if (append(self->odd_turns, odd) < 0) return -1;
    }
    self->turn_answers = self->turn_steps = 0;
    self->num_turns++;
    return 0;
}

static PyObject *log_end(TurnLog *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "end takes 2 arguments");
    if (self->stage != SENT || !is_time_of_turn(self, args[0]) || args[1] != Py_None) return PyLong_FromLong(REFUSED);
    double now = self->times[self->num_turns];
    if (close_turn(self, 1) < 0) return NULL;
    self->stage = BETWEEN;
    return PyLong_FromLong(now >= self->due || self->num_answers >= self->max_turns ? DUE : TAKEN);
}

static PyObject *log_leave(TurnLog *self, PyObject *unused) {
    if ((self->stage == ANSWERED || self->stage == SENT) && close_turn(self, 0) < 0) return NULL;
    self->stage = IDLE;
    Py_RETURN_NONE;
}

/* The list in ``place``, which has an empty one then. */
static PyObject *taken(PyObject **place) {
    PyObject *list = *place, *fresh = PyList_New(0);
    if (fresh == NULL) return NULL;
    *place = fresh;
    return list;
}

static PyObject *numbers(const void *first, Py_ssize_t stride, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t index = 0; list != NULL && index < count; index++) {
        PyObject *item = PyLong_FromLongLong(*(const long long *)((const char *)first + index * stride));
        if (item == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, index, item);
    }
    return list;
}

static PyObject *log_take(TurnLog *self, PyObject *unused) {
    Py_ssize_t count = self->num_turns, num_answers = self->num_answers;
    if (count == 0) Py_RETURN_NONE;
    if (self->stage == ANSWERED || self->stage == SENT) return PyErr_Format(PyExc_ValueError, "a turn is under way");
    PyObject *times = PyList_New(count), *lens = PyList_New(self->size);
    for (Py_ssize_t index = 0; times != NULL && index < count; index++) {
        PyObject *time = PyFloat_FromDouble(self->times[index]);
        if (time == NULL) Py_CLEAR(times);
        else PyList_SET_ITEM(times, index, time);
    }
    for (Py_ssize_t index = 0; lens != NULL && index < self->size; index++) {
        PyObject *length = PyLong_FromSsize_t(self->rows[index].blocks);
        if (length == NULL) Py_CLEAR(lens);
        else PyList_SET_ITEM(lens, index, length);
    }
    const Answer *answers = self->answers;
    /* Py_BuildValue gives up all of these when one of them is NULL. */
    PyObject *result = Py_BuildValue(
        "(OLLNNNNNNNNN)", self->latest, self->next_answer - num_answers, self->next_step - self->num_sent, times,
        numbers(&answers->queue_us, sizeof(Answer), num_answers),
        numbers(&answers->graph_us, sizeof(Answer), num_answers),
        numbers(&answers->sample_us, sizeof(Answer), num_answers), taken(&self->growths), taken(&self->states),
        taken(&self->updates), taken(&self->odd_turns), lens);
    self->num_turns = self->num_answers = self->num_sent = 0;
    return result;
}

static PyMethodDef methods[] = {
    {"begin", (PyCFunction)log_begin, METH_VARARGS, NULL},
    {"answer", (PyCFunction)(void (*)(void))log_answer, METH_FASTCALL, NULL},
    {"step", (PyCFunction)(void (*)(void))log_step, METH_FASTCALL, NULL},
    {"end", (PyCFunction)(void (*)(void))log_end, METH_FASTCALL, NULL},
    {"take", (PyCFunction)log_take, METH_NOARGS, NULL},
    {"leave", (PyCFunction)log_leave, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"due", T_DOUBLE, offsetof(TurnLog, due), 0, NULL},
    {"num_steps", T_LONGLONG, offsetof(TurnLog, num_steps), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject TurnLogType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "llm_serving.flight._turn_log.TurnLog",
    .tp_basicsize = sizeof(TurnLog),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "See llm_serving.flight.turn_log.TurnLog.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)log_init,
    .tp_dealloc = (destructor)log_dealloc,
    .tp_methods = methods,
    .tp_members = members,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_turn_log", .m_size = -1};

PyMODINIT_FUNC PyInit__turn_log(void) {
    if (PyType_Ready(&TurnLogType) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddObjectRef(made, "TurnLog", (PyObject *)&TurnLogType) < 0) Py_CLEAR(made);
    return made;
}
